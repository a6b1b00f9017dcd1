"""NVIDIA NIXL: two agents, UCX between them; `shm` lets it choose (shared memory on one host), `tcp` holds it to sockets.

It has no keys, no index and no probe: a transfer names addresses that the other side has told, so only gets and puts are measured. Its
progress thread spins, so that both processes are to be stopped between their turns.
"""

import importlib
import os
import struct
import subprocess
import sys
import time
from importlib.metadata import version
from typing import IO, Any

from bench.peers.turns import BATCH, LARGE, SMALL, SMALL_KEYS, WORKING_SETS, Case, Memory, addresses, check, take_turns

POOL = WORKING_SETS * BATCH * LARGE
_LENGTH = struct.Struct("<QQ")


def agent(name: str) -> Any:
    """An agent with UCX, its progress thread as by default."""
    api = importlib.import_module("nixl_cu12._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def tell(stream: IO[bytes], address: int, metadata: bytes) -> None:
    """Send where the pool is and how to reach it."""
    stream.write(_LENGTH.pack(address, len(metadata)) + metadata)
    stream.flush()


def told(stream: IO[bytes]) -> tuple[int, bytes]:
    """What `tell` sent."""
    address, length = _LENGTH.unpack(stream.read(_LENGTH.size))
    return address, stream.read(length)


def target() -> None:
    """The other side: memory and an agent, until the input ends."""
    mine, memory = agent("target"), Memory(POOL)
    mine.register_memory([(memory.address, POOL, 0, "")], "DRAM")
    tell(sys.stdout.buffer, memory.address, mine.get_agent_metadata())
    mine.add_remote_agent(told(sys.stdin.buffer)[1])
    sys.stdin.buffer.read()
    os._exit(0)


def main(mode: str) -> None:
    os.environ["NIXL_LOG_LEVEL"] = "FATAL"
    if mode == "tcp":
        os.environ["UCX_TLS"] = "tcp"
    command = [sys.executable, "-m", "bench.peers.nixl", "target"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as far:
        assert far.stdin is not None
        assert far.stdout is not None
        mine, memory = agent("initiator"), Memory(POOL)
        mine.register_memory([(memory.address, POOL, 0, "")], "DRAM")
        remote, metadata = told(far.stdout)
        peer = mine.add_remote_agent(metadata)
        tell(far.stdin, 0, mine.get_agent_metadata())
        mine.make_connection(peer)
        about = {"spins": True}
        take_turns(f"nixl {mode}", version("nixl-cu12"), make_cases(mine, peer, memory.address, remote), [far.pid], **about)
        far.kill()
    os._exit(0)


def make_cases(mine: Any, peer: Any, local: int, remote: int) -> dict[str, Case]:
    """Gets and puts; descriptors and handle are made anew each time, as by a caller whose blocks lie somewhere else each time."""

    def move(kind: str, offsets: list[int], size: int) -> None:
        to = mine.get_xfer_descs([(local + index * size, size, 0) for index in range(len(offsets))], "DRAM")
        of = mine.get_xfer_descs([(remote + offset, size, 0) for offset in offsets], "DRAM")
        handle = mine.initialize_xfer(kind, to, of, peer)
        state, give_up = mine.transfer(handle), time.monotonic() + 30
        while state == "PROC" and time.monotonic() < give_up:
            state = mine.check_xfer_state(handle)
        check(state == "DONE", state)
        mine.release_xfer_handle(handle)

    def batch(i: int) -> list[int]:
        return addresses(i % WORKING_SETS * BATCH * LARGE, LARGE, BATCH)

    return {
        "get_64k": Case(lambda i: move("READ", [i % SMALL_KEYS * SMALL], SMALL), SMALL),
        "get_1m": Case(lambda i: move("READ", [i % (WORKING_SETS * BATCH) * LARGE], LARGE), LARGE),
        "get_32x1m": Case(lambda i: move("READ", batch(i), LARGE), BATCH * LARGE),
        "put_64k": Case(lambda i: move("WRITE", [i % SMALL_KEYS * SMALL], SMALL), SMALL),
        "put_32x1m": Case(lambda i: move("WRITE", batch(i), LARGE), BATCH * LARGE),
    }


if __name__ == "__main__":
    target() if sys.argv[1] == "target" else main(sys.argv[1])
