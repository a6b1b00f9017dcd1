"""What clients do to a real node: hold blocks while it is full, stop in mid-write, probe without end. Disks fail in tests/tier/ssd."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockKey, Framer
from kvpool.errors import FrameError
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.pool import PoolLimits
from kvpool.request.pool import NodeDescription, Outcome, Reservation, ShmOffer
from kvpool.testing.node_process import NodeProcess
from kvpool.tier import ArenaMapping
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

from .conftest import FRAMER, LENGTH, SIZE, chain, until

BLOCKS = 32
_LIMIT_S = 20.0
FRAMES: Framer = FRAMER


class Reader:
    """A client by hand: control calls, and the node's arena mapped."""

    def __init__(self, rpc: PoolRpc, described: NodeDescription) -> None:
        assert isinstance(described.shm, ShmOffer)
        self.rpc = rpc
        self.capacity = described.capacity_bytes
        self.arena = ArenaMapping.open(described.shm.path, described.node_id, described.incarnation)

    async def put(self, keys: Sequence[BlockKey], *, lease_ms: int = 10_000) -> list[Outcome]:
        blocks = [Reservation(key, keys[i - 1] if i else b"", 16 * i, LENGTH) for i, key in enumerate(keys)]
        lease_id, grants = await self.rpc.reserve("w", lease_ms, blocks, _LIMIT_S)
        wrote: list[BlockKey] = []
        for i, (key, (outcome, offset)) in enumerate(zip(keys, grants, strict=True)):
            if outcome is Outcome.GRANTED:
                self.write(key, keys[i - 1] if i else FRAMES.root, offset)
                wrote.append(key)
        if wrote:
            assert all(await self.rpc.commit(lease_id, wrote, _LIMIT_S))
        return [outcome for outcome, _ in grants]

    def write(self, key: BlockKey, parent: BlockKey, offset: int) -> None:
        frame = self.arena.view(offset, LENGTH)
        frame[:] = key[0]
        FRAMES.stamp(frame, key, parent, 16)

    def whole(self, key: BlockKey, place: tuple[int, int]) -> bool:
        try:
            return bool(np.all(FRAMES.open(self.arena.view(*place), key).payload == key[0]))
        except FrameError:
            return False


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    """A node of its own with room for `BLOCKS` blocks."""
    process = NodeProcess("--capacity", str(BLOCKS * SIZE), "--offer", "shm,grpc")
    probe = PoolRpc(process.address)
    described = await probe.describe(_LIMIT_S)
    await probe.close()
    rpc = PoolRpc(process.address, NodeIdentity(described.node_id, described.incarnation))
    try:
        yield Reader(rpc, described)
    finally:
        await rpc.close()
        assert process.stop() == 0, "".join(process.log)


async def test_reader_holds_a_block_while_the_pool_is_full_and_rewritten(reader: Reader) -> None:
    """Leased bytes never change under their reader, whatever else the pool must find room for."""
    held = chain("held", 2)
    await reader.put(held)
    lease_id, places = await reader.rpc.acquire("r", 60_000, held, _LIMIT_S)
    for turn in range(20):
        outcomes = await reader.put(chain(f"c{turn}", BLOCKS - 4))
        assert outcomes == [Outcome.GRANTED] * (BLOCKS - 4)
        assert all(place is not None and reader.whole(key, place) for key, place in zip(held, places, strict=True))
    assert await reader.put(chain("all", BLOCKS)) == [Outcome.GRANTED] * (BLOCKS - 2) + [Outcome.NO_SPACE] * 2
    await reader.rpc.release(lease_id, (), _LIMIT_S)
    assert Outcome.NO_SPACE not in await reader.put(chain("more", BLOCKS))


WRITER = """
import asyncio, sys
from kvpool.request.pool import Reservation
from kvpool.tier import ArenaMapping
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

async def main(address, count, length):
    probe = PoolRpc(address)
    d = await probe.describe(20)
    rpc = PoolRpc(address, NodeIdentity(d.node_id, d.incarnation))
    arena = ArenaMapping.open(d.shm.path, d.node_id, d.incarnation)
    keys = [bytes([i]) * 32 for i in range(count)]
    lease, grants = await rpc.reserve("stopped", 1000, [Reservation(k, b"", 0, length) for k in keys], 20)
    print("reserved", len(grants), flush=True)
    sys.stdin.readline()
    for _, offset in grants:
        arena.view(offset, length)[:] = 0xEE  # back from the dead: these bytes are somebody else's
    print("committed", sum(await rpc.commit(lease, keys, 20)), flush=True)
    await rpc.close()
    await probe.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.fixture
async def unfenced(tmp_path: Path) -> AsyncIterator[Reader]:
    """The same, but bytes under a lease that ran out are anybody's at once, as the default is after half a minute."""
    node = PoolNode(NodeConfig(capacity_bytes=BLOCKS * SIZE, offers=("shm", "grpc"), arena_directory=tmp_path, limits=PoolLimits()))
    await node.start()
    rpc = PoolRpc(node.address, NodeIdentity(node.node_id, node.incarnation))
    try:
        yield Reader(rpc, await rpc.describe(_LIMIT_S))
    finally:
        await rpc.close()
        await node.stop()


@asynccontextmanager
async def stopped_writer(reader: Reader) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A client that holds the whole pool for writing is stopped, and its lease has ended. What this gives lets it scribble, and end."""
    argv = [sys.executable, "-c", WRITER, reader.rpc.address, str(BLOCKS), str(LENGTH)]
    with await asyncio.to_thread(lambda: subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)) as writer:
        try:
            assert writer.stdout is not None
            assert await asyncio.to_thread(writer.stdout.readline) == f"reserved {BLOCKS}\n"
            writer.send_signal(signal.SIGSTOP)
            assert await reader.put(chain("early", 1)) == [Outcome.NO_SPACE]
            deadline = time.monotonic() + _LIMIT_S
            while (await reader.rpc.describe(_LIMIT_S)).write_leases:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)

            async def goes_on() -> None:
                assert writer.stdin is not None
                assert writer.stdout is not None
                writer.send_signal(signal.SIGCONT)
                writer.stdin.write("\n")
                writer.stdin.flush()
                assert await asyncio.to_thread(writer.stdout.readline) == "committed 0\n"
                assert writer.wait(_LIMIT_S) == 0

            yield goes_on
        finally:
            writer.kill()


async def test_stopped_writer_loses_its_reservations_and_can_publish_nothing_afterwards(unfenced: Reader) -> None:
    """SIGSTOP of a client that writes: others write once its time is up, and what it scribbles even later is never served as theirs."""
    reader, keys = unfenced, chain("after", BLOCKS)
    async with stopped_writer(reader) as goes_on:
        assert await reader.put(keys) == [Outcome.GRANTED] * BLOCKS
        await goes_on()
    lease_id, places = await reader.rpc.acquire("r", 10_000, keys, _LIMIT_S)
    assert not any(place is not None and reader.whole(key, place) for key, place in zip(keys, places, strict=True))
    await reader.rpc.release(lease_id, keys, _LIMIT_S)
    assert await reader.rpc.lookup(keys, _LIMIT_S) == bytes(BLOCKS)
    assert (await reader.rpc.describe(_LIMIT_S)).counters["corrupt"] == BLOCKS
    assert await reader.put(keys) == [Outcome.GRANTED] * BLOCKS


async def test_stopped_writer_scribbles_on_nobodys_bytes_while_its_fence_lasts(reader: Reader) -> None:
    """A node keeps the bytes of a lease that ran out for itself for a while, so a writer that is a little late harms nobody."""
    async with stopped_writer(reader) as goes_on:
        assert await reader.put(chain("after", BLOCKS)) == [Outcome.NO_SPACE] * BLOCKS
        await goes_on()
    described = await reader.rpc.describe(_LIMIT_S)
    assert (described.blocks, described.write_leases, described.pinned_bytes) == (0, 0, described.capacity_bytes)


async def test_probe_storm_neither_stops_eviction_nor_keeps_anything_warm(reader: Reader) -> None:
    """Probes at any rate (peers stalled at 1,400/s) take no lease and change no order: the oldest still leave first."""
    old, young = chain("old", BLOCKS // 2), chain("young", BLOCKS // 2)
    await reader.put(old)
    await reader.put(young)
    stop = asyncio.Event()
    probes = 0

    async def storm() -> None:
        nonlocal probes
        while not stop.is_set():
            assert len(await reader.rpc.lookup(old, _LIMIT_S)) == len(old)
            probes += 1

    storms = [asyncio.create_task(storm()) for _ in range(16)]
    try:
        await until(lambda: probes > 500)
        assert await reader.put(chain("new", BLOCKS // 2)) == [Outcome.GRANTED] * (BLOCKS // 2)
        before = probes
        await until(lambda: probes > before + 500)
    finally:
        stop.set()
        await asyncio.gather(*storms)
    assert await reader.rpc.lookup(old, _LIMIT_S) == bytes(len(old))
    assert await reader.rpc.lookup(young, _LIMIT_S) == b"\1" * len(young)
    assert (await reader.rpc.describe(_LIMIT_S)).read_leases == 0


async def test_bit_flip_anywhere_in_a_frame_is_never_served(reader: Reader) -> None:
    """Header, checksum field, first and last byte of the payload: whoever reads it sees it, and the node drops the block."""
    keys = chain("flip", 8)
    await reader.put(keys)
    lease_id, places = await reader.rpc.acquire("r", 10_000, keys, _LIMIT_S)
    for key, place, at in zip(
        keys, places, (0, 9, 70, 130, FRAMES.header_bytes - 1, FRAMES.header_bytes, LENGTH // 2, LENGTH - 1), strict=True
    ):
        assert place is not None
        reader.arena.view(*place)[at] ^= 0x10
        assert not reader.whole(key, place)
    await reader.rpc.release(lease_id, keys, _LIMIT_S)
    assert await reader.rpc.lookup(keys, _LIMIT_S) == bytes(8)


def test_node_with_more_than_it_can_take_says_what_to_do() -> None:
    """A directory that can't be written is told at the start, by name."""
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.node", "--ssd", "/proc/kvpool"], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert "/proc/kvpool" in done.stderr
    assert "Traceback" not in done.stderr
