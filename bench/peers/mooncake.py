"""Mooncake Store: a master, a storage node, and this client; `tcp` by its transfer engine, `dummy` by shared memory with the node.

`dummy` is its way for clients on the node's host: the caller's buffers must lie in a pool that it shares with the node, and the node
copies into them. The wheel's defaults, but that the segment is touched once before anything is measured.
"""

import ctypes
import importlib
import os
import sys
import time
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

from bench.peers import turns
from bench.peers.turns import BATCH, LARGE, MIB, PROBED, SMALL, SMALL_KEYS, WORKING_SETS, Case, Memory, addresses, check

SEGMENT = 1024 * MIB
BUFFER = WORKING_SETS * BATCH * LARGE
MASTER_WAITS_S = 2.0


def main(mode: str) -> None:
    os.environ["GLOG_minloglevel"] = "3"  # noqa: SIM112
    with ExitStack() as stack:
        master, metrics, node = (turns.free_port() for _ in range(3))
        where = [f"--rpc_port={master}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
        servers = [stack.enter_context(turns.server([turns.program("mooncake_master"), *where], master))]
        flags = [f"--master_server_address=127.0.0.1:{master}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"]
        flags += ["--host=127.0.0.1", f"--port={node}", f"--global_segment_size={SEGMENT // MIB} MB"]
        flags += ["--local_buffer_size=512 MB", "--threads=2"] if mode == "dummy" else []
        servers.append(stack.enter_context(turns.server([turns.program("mooncake_client"), *flags], node)))
        time.sleep(MASTER_WAITS_S)  # until the node has registered its segment
        store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        base, _memory = open_dummy(store, node) if mode == "dummy" else open_tcp(store, master)
        check(store.register_buffer(base, BUFFER) == 0, "register_buffer")
        name = "mooncake dummy" if mode == "dummy" else "mooncake tcp"
        turns.take_turns(name, version("mooncake-transfer-engine-non-cuda"), make_cases(store, base), servers)
    os._exit(0)  # its threads don't end by themselves


def open_tcp(store: Any, master: int) -> tuple[int, Memory | None]:
    """Connect by the transfer engine; the address of a buffer of this process, and who keeps it."""
    check(store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 * MIB, "tcp", "", f"127.0.0.1:{master}") == 0, "setup")
    memory = Memory(BUFFER)
    return memory.address, memory


def open_dummy(store: Any, node: int) -> tuple[int, Memory | None]:
    """Connect by shared memory; the address of a buffer in the pool that the node maps, too."""
    check(store.setup_dummy(2 * BUFFER, 64 * MIB, f"127.0.0.1:{node}") == 0, "setup_dummy")
    base = int(store.alloc_from_mem_pool(BUFFER))
    ctypes.memset(base, 0x5A, BUFFER)
    return base, None


def make_cases(store: Any, base: int) -> dict[str, Case]:
    """Touch the segment, store the working sets, and say how each case is done."""
    large, small = addresses(base, LARGE, BATCH), addresses(base, SMALL, SMALL_KEYS)
    for index in range(SEGMENT // (16 * MIB) - 8):
        check(store.put_from(f"warm{index}", base, 16 * MIB) == 0, f"warm{index}")
    store.remove_all(True)
    sets = [[f"L{one}-{index}" for index in range(BATCH)] for one in range(WORKING_SETS)]
    for keys in sets:
        check(set(store.batch_put_from(keys, large, [LARGE] * BATCH)) == {0}, "put of a working set")
    names = [f"S{index}" for index in range(SMALL_KEYS)]
    check(set(store.batch_put_from(names, small, [SMALL] * SMALL_KEYS)) == {0}, "put of the small ones")
    probed = [f"P{index}" for index in range(PROBED)]
    check(set(store.batch_put_from(probed, [base] * PROBED, [256] * PROBED)) == {0}, "put of the probed ones")

    def get_batch(i: int) -> None:
        found = store.batch_get_into(sets[i % WORKING_SETS], large, [LARGE] * BATCH)
        check(found == [LARGE] * BATCH, found)

    def put_batch(i: int) -> None:
        check(set(store.batch_put_from([f"put{i}-{index}" for index in range(BATCH)], large, [LARGE] * BATCH)) == {0}, i)

    def forget() -> None:
        store.remove_by_regex("^put.*", True)

    return {
        "get_64k": Case(lambda i: check(store.get_into(names[i % SMALL_KEYS], base, SMALL) == SMALL, i), SMALL),
        "get_1m": Case(lambda i: check(store.get_into(f"L{i // BATCH % WORKING_SETS}-{i % BATCH}", base, LARGE) == LARGE, i), LARGE),
        "get_32x1m": Case(get_batch, BATCH * LARGE),
        "put_64k": Case(lambda i: check(store.put_from(f"puts{i}", base, SMALL) == 0, i), SMALL, forget),
        "put_32x1m": Case(put_batch, BATCH * LARGE, forget),
        "probe512": Case(lambda i: check(store.batch_is_exist(probed) == [1] * PROBED, i)),
    }


if __name__ == "__main__":
    main(sys.argv[1])
