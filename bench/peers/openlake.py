"""openlake: its daemon keeps a slab that clients of the host map, and is asked over TCP where in it a key lies.

A slab has slots of one size, so that there is a daemon for 64 KiB and one for 1 MiB. Keys are exactly 54 bytes.
"""

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.peers import turns
from bench.peers.turns import BATCH, LARGE, PROBED, SMALL, SMALL_KEYS, WORKING_SETS, Case, Memory, addresses, check

KEY_BYTES = 54
_CONFIG = """
self_id = 0
mode = "kv"
transport = "h2"
rpc_addr = "127.0.0.1:{port}"
kv_agents = ["127.0.0.1:{port}"]
s3_addr = "127.0.0.1:{s3}"
region = "us-east-1"
data_dirs = []
set_drive_count = 1
default_parity_count = 1
[[credentials]]
access_key = "openlake"
secret_key = "openlake"
[[nodes]]
id = 0
rpc_addr = "127.0.0.1:{port}"
disk_count = 0
[kv_slab]
capacity_gb = 2
reserve_ttl_secs = 60
"""


@contextmanager
def store(memory: Memory, nbytes: int, size: int) -> Iterator[tuple[int, Any]]:
    """A daemon with slots for `size` bytes, and a client of it; the daemon's process id and the client."""
    module = importlib.import_module("openlake_client")
    port, s3 = turns.free_port(), turns.free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(_CONFIG.format(port=port, s3=s3))
        file.flush()
        with turns.server([str(Path(str(module.__file__)).parent / "openlaked"), "--config", file.name], port) as pid:
            client = module.Client("local", 2048)
            client.register_memory(memory.address, nbytes)
            client.attach(f"127.0.0.1:{port}", 0, size + KEY_BYTES)
            try:
                yield pid, client
            finally:
                client.close()
                Path(f"/dev/shm/openlake_kv_{pid}_0").unlink(missing_ok=True)  # the daemon leaves it behind


def key(name: str) -> bytes:
    return name.encode().ljust(KEY_BYTES, b"\0")


def main() -> None:
    with ExitStack() as stack:
        nbytes = BATCH * LARGE
        memory = Memory(nbytes)
        small = stack.enter_context(store(memory, nbytes, SMALL))
        large = stack.enter_context(store(memory, nbytes, LARGE))
        turns.take_turns("openlake local", version("openlake-vllm"), make_cases(small[1], large[1], memory), [small[0], large[0]])
    os._exit(0)


def make_cases(small: Any, large: Any, memory: Memory) -> dict[str, Case]:
    def put(client: Any, size: int, keys: list[bytes]) -> None:
        done = client.put_batch(keys, [[at] for at in addresses(memory.address, size, len(keys))], [[size]] * len(keys))
        check(all(code >= 0 for code in done), done)

    def get(client: Any, size: int, keys: list[bytes]) -> None:
        done = client.get_batch(keys, [[at] for at in addresses(memory.address, size, len(keys))], [[size]] * len(keys))
        check(all(code >= 0 for code in done), done)

    sets = [[key(f"L{one}-{index}") for index in range(BATCH)] for one in range(WORKING_SETS)]
    for keys in sets:
        put(large, LARGE, keys)
    probed = [key(f"P{index}") for index in range(PROBED)]
    for start in range(0, PROBED, 128):
        put(small, SMALL, probed[start : start + 128])
    return {
        "get_64k": Case(lambda i: get(small, SMALL, [probed[i % SMALL_KEYS]]), SMALL),
        "get_1m": Case(lambda i: get(large, LARGE, [sets[i // BATCH % WORKING_SETS][i % BATCH]]), LARGE),
        "get_32x1m": Case(lambda i: get(large, LARGE, sets[i % WORKING_SETS]), BATCH * LARGE),
        "put_64k": Case(lambda i: put(small, SMALL, [key(f"put{i}")]), SMALL),
        "put_32x1m": Case(lambda i: put(large, LARGE, [key(f"put{i}-{index}") for index in range(BATCH)]), BATCH * LARGE),
        "probe512": Case(lambda i: check(small.batch_is_exist(probed) == [1] * PROBED, i)),
    }


if __name__ == "__main__":
    main()
