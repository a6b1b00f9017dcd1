"""redhare: a store in each process, Redis between them; the reader pulls from the owner's memory over redhare's own TCP data plane.

A put stays in the putting process, so that puts here are local; gets are of what the other process holds.
"""

import importlib
import os
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any

from bench.peers.resp import resp_server
from bench.peers.turns import BATCH, LARGE, PROBED, SMALL, SMALL_KEYS, WORKING_SETS, Case, Memory, addresses, check, free_port, take_turns

_SEEN_S = 30.0


class Store:
    """A redhare store with one registered buffer."""

    def __init__(self, name: str, redis_port: int) -> None:
        kind = importlib.import_module("redhare").KvStore
        address = f"127.0.0.1:{free_port()}"
        self._memory = Memory(BATCH * LARGE)
        self._store: Any = kind(
            redis_url=f"redis://127.0.0.1:{redis_port}", client_id=name, data_plane_addr=address, capacity="2GB", transport="tcp"
        )
        self._store.register_buffer(self._memory.address, BATCH * LARGE)

    def put(self, keys: list[str], size: int) -> None:
        """Store buffers of `size` bytes."""
        done = self._store.batch_put_from_multi_buffers(keys, *self._buffers(len(keys), size))
        check(not any(done), done)

    def get(self, keys: list[str], size: int) -> None:
        """Read into the buffer, from wherever the keys are."""
        done = self._store.batch_get_into_multi_buffers(keys, *self._buffers(len(keys), size))
        check(not any(done), done)

    def has(self, keys: list[str]) -> bool:
        """Whether all keys are known."""
        return bool(self._store.batch_is_exist(keys) == [1] * len(keys))

    def remove(self, keys: list[str]) -> None:
        """Forget keys of this process."""
        for key in keys:
            self._store.remove(key)

    def _buffers(self, count: int, size: int) -> tuple[list[list[int]], list[list[int]]]:
        return [[at] for at in addresses(self._memory.address, size, count)], [[size]] * count


SETS = [[f"L{one}-{index}" for index in range(BATCH)] for one in range(WORKING_SETS)]
SMALL_NAMES = [f"S{index}" for index in range(SMALL_KEYS)]
PROBED_NAMES = [f"P{index}" for index in range(PROBED)]


def owner(redis_port: int) -> None:
    """The other process: stores what is read, until its input ends."""
    store = Store("owner", redis_port)
    for keys in SETS:
        store.put(keys, LARGE)
    store.put(SMALL_NAMES, SMALL)
    store.put(PROBED_NAMES, 256)
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    with resp_server() as (redis_pid, port):
        command = [sys.executable, "-m", "bench.peers.redhare", str(port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr) as far:
            store = Store("reader", port)
            give_up = time.monotonic() + _SEEN_S
            while not all(map(store.has, (*SETS, SMALL_NAMES, PROBED_NAMES))):
                check(time.monotonic() < give_up and far.poll() is None, "the owner's keys were never seen")
                time.sleep(0.05)
            take_turns("redhare tcp", version("redhare"), make_cases(store), [far.pid, redis_pid])
            far.kill()
    os._exit(0)


def make_cases(store: Store) -> dict[str, Case]:
    stored: list[str] = []

    def put(keys: list[str], size: int) -> None:
        stored.extend(keys)
        store.put(keys, size)

    def forget() -> None:
        store.remove(stored)
        stored.clear()

    return {
        "get_64k": Case(lambda i: store.get([SMALL_NAMES[i % SMALL_KEYS]], SMALL), SMALL),
        "get_1m": Case(lambda i: store.get([SETS[i // BATCH % WORKING_SETS][i % BATCH]], LARGE), LARGE),
        "get_32x1m": Case(lambda i: store.get(SETS[i % WORKING_SETS], LARGE), BATCH * LARGE),
        "put_64k": Case(lambda i: put([f"put{i}"], SMALL), SMALL, forget),
        "put_32x1m": Case(lambda i: put([f"put{i}-{index}" for index in range(BATCH)], LARGE), BATCH * LARGE, forget),
        "probe512": Case(lambda i: check(store.has(PROBED_NAMES), i)),
    }


if __name__ == "__main__":
    owner(int(sys.argv[1])) if len(sys.argv) > 1 else main()
