"""The events of a real node process: over `kill -9`, restarts, and an end in order."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from kvpool.block import BlockKey, Geometry, LayerSpec, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.client.feed import NodeFeed, follow
from kvpool.client.transfer import Payload
from kvpool.errors import RemoteError
from kvpool.request.events import BELOW, DRAM, EventBatch
from kvpool.testing.node_process import NodeProcess
from kvpool.units import KIB, SECOND
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.pool_client import PoolRpc

GEOMETRY = Geometry(tuple(LayerSpec("full", 2, 64, 64) for _ in range(4)), 16, "float32")
NAMESPACE = Namespace(model="events", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
NODE_ID = "e5" * 16
CHAINS, BLOCKS = 4, 8
"""32 blocks of 64 KiB, in a node with memory for 20."""
LIMIT_S = 40.0

Start = Callable[[], NodeProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the node over the same disk as before."""
    started: list[NodeProcess] = []

    def one() -> NodeProcess:
        where = ("--capacity", str(20 * 66 * KIB), "--id", NODE_ID, "--ssd", str(tmp_path / "ssd"), "--ssd-capacity", "256MiB")
        started.append(NodeProcess(*where, "--offer", "shm,grpc"))
        return started[-1]

    yield one
    for process in started:
        process.stop()


async def fill_node(address: str) -> list[BlockKey]:
    """Write all chains; their keys."""
    keys: list[BlockKey] = []

    def fill(index: int, payload: Payload) -> None:
        payload[:] = index

    async with await AsyncPoolClient.open(address, NAMESPACE) as client:
        for number in range(CHAINS):
            chain = client.keys(range(number * 1000, number * 1000 + 16 * BLOCKS))
            assert await client.store(chain, 0, [16] * BLOCKS, fill, deadline_ns=time.monotonic_ns() + 20 * SECOND) == BLOCKS
            keys += chain
    return keys


async def read_until(batches: AsyncGenerator[EventBatch, None], done: Callable[[], bool]) -> None:
    async for _ in batches:
        if done():
            return


def held(feed: NodeFeed) -> set[BlockKey]:
    return {one[0] for one in feed.blocks()}


async def present(address: str, keys: list[BlockKey]) -> set[BlockKey]:
    """What the node says it has when it is asked."""
    rpc = PoolRpc(address)
    found = await rpc.lookup(keys, 20)
    await rpc.close()
    return {key for key, there in zip(keys, found, strict=True) if there}


async def test_feed_over_a_kill_and_a_restart_is_what_the_disk_kept(start: Start) -> None:
    """`kill -9`: the consumer notices, waits, meets the next life, and has what came back from the disk, no more and no less."""
    feed, errors = NodeFeed(), list[RemoteError]()
    place = [start()]
    async with asyncio.timeout(LIMIT_S):
        async with aclosing(follow(feed, lambda: EventsRpc(place[-1].address), on_error=errors.append)) as batches:
            await read_until(batches, lambda: feed.complete)
            keys = await fill_node(place[-1].address)
            await read_until(batches, lambda: held(feed) == set(keys))
            assert {one[3] for one in feed.blocks()} == {DRAM, BELOW}  # memory has room for 20 of 32
            assert not errors
            life = feed.incarnation
            place[-1].kill()
            place.append(start())
            await read_until(batches, lambda: feed.complete and feed.incarnation > life)
    assert errors
    assert held(feed) == await present(place[-1].address, keys)
    assert len(feed) >= 12
    assert {one[3] for one in feed.blocks()} == {BELOW}
    for number, key in enumerate(keys):
        block = feed.get(key)
        first = number % BLOCKS == 0
        assert block is None or block[1:3] == (None if first else keys[number - 1], number % BLOCKS * 16)


async def test_node_that_stops_in_order_ends_its_streams_at_once(start: Start) -> None:
    """An open stream doesn't hold up the node's end, and the next life has everything on the disk."""
    feed, errors = NodeFeed(), list[RemoteError]()
    place = [start()]
    async with asyncio.timeout(LIMIT_S):
        async with aclosing(follow(feed, lambda: EventsRpc(place[-1].address), on_error=errors.append)) as batches:
            keys = await fill_node(place[-1].address)
            await read_until(batches, lambda: held(feed) == set(keys))
            life = feed.incarnation
            assert await asyncio.to_thread(place[-1].stop) == 0, "".join(place[-1].log)
            place.append(start())
            await read_until(batches, lambda: feed.complete and feed.incarnation > life)
    assert "the node stops" in str(errors[0])
    assert held(feed) == set(keys)
