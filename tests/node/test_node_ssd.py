"""A real node with a real disk under it: more blocks than memory, killed and started again."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import Geometry, LayerSpec, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.client.transfer import Payload
from kvpool.errors import UnavailableError
from kvpool.testing.node_process import NodeProcess
from kvpool.units import KIB, SECOND
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

GEOMETRY = Geometry(tuple(LayerSpec("full", 2, 64, 64) for _ in range(4)), 16, "float32")
NAMESPACE = Namespace(model="ssd", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
NODE_ID = "5d" * 16
TOKENS = 16
CHAINS, BLOCKS = 12, 8
"""96 blocks of 64 KiB, in a node with memory for 24."""
_LIMIT_S = 20.0

Start = Callable[..., NodeProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the node over the same directory as before."""
    started: list[NodeProcess] = []

    def one(*flags: str) -> NodeProcess:
        capacity = 24 * 66 * KIB
        where = ("--capacity", str(capacity), "--id", NODE_ID, "--ssd", str(tmp_path / "ssd"), "--ssd-capacity", "256MiB")
        started.append(NodeProcess(*where, *flags))
        return started[-1]

    yield one
    for process in started:
        process.stop()


def tokens_of(number: int) -> range:
    return range(number * 1000, number * 1000 + TOKENS * BLOCKS)


def deadline_ns() -> int:
    return time.monotonic_ns() + int(_LIMIT_S * SECOND)


async def put(client: AsyncPoolClient, number: int) -> int:
    def fill(index: int, payload: Payload) -> None:
        payload[:] = (number * 16 + index) % 251

    return await client.store(client.keys(tokens_of(number)), 0, [TOKENS] * BLOCKS, fill, deadline_ns=deadline_ns())


async def get(client: AsyncPoolClient, number: int) -> int:
    def sink(index: int, payload: Payload) -> None:
        assert np.all(payload == (number * 16 + index) % 251)

    return await client.load(client.keys(tokens_of(number)), 0, [TOKENS] * BLOCKS, sink, deadline_ns=deadline_ns())


async def put_all(client: AsyncPoolClient) -> None:
    """Whoever finds no room within a call's patience, because the disk is slower than that, comes again."""
    for number in range(CHAINS):
        async with asyncio.timeout(_LIMIT_S):
            while await put(client, number) < BLOCKS:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def get_all(client: AsyncPoolClient, numbers: Sequence[int] = range(CHAINS)) -> int:
    return sum([await get(client, number) for number in numbers])


async def on_disk(process: NodeProcess) -> int:
    admin = AdminRpc(process.address)
    reports = {report.name: report for report in await admin.tiers(_LIMIT_S)}
    await admin.close()
    assert reports["ssd"].state == "ok", reports["ssd"].reason
    return reports["ssd"].objects


async def test_four_times_the_memory_is_kept_and_read_back(start: Start) -> None:
    """Nothing acknowledged is dropped for want of memory, and every byte comes back right through the arena."""
    process = start()
    async with await AsyncPoolClient.open(process.address, NAMESPACE) as client:
        await put_all(client)
        assert await client.lookup(client.keys(tokens_of(0))) == BLOCKS
        assert await get_all(client) == CHAINS * BLOCKS
    assert await on_disk(process) >= CHAINS * BLOCKS - 24


async def test_node_stopped_in_order_has_everything_when_it_is_back(start: Start) -> None:
    """A restart for an upgrade costs no block."""
    process = start()
    async with await AsyncPoolClient.open(process.address, NAMESPACE) as client:
        await put_all(client)
    assert process.stop() == 0, "".join(process.log)
    process = start()
    assert await on_disk(process) == CHAINS * BLOCKS
    async with await AsyncPoolClient.open(process.address, NAMESPACE) as client:
        assert await get_all(client) == CHAINS * BLOCKS


@pytest.mark.parametrize("write", ["through", "back"])
async def test_killed_node_serves_what_was_on_disk_under_a_new_incarnation(start: Start, write: str) -> None:
    """kill -9: the index comes back from the log alone, what was written down is readable, and leases of the life before mean nothing."""
    process = start("--write", write)
    rpc = PoolRpc(process.address)
    before = await rpc.describe(_LIMIT_S)
    async with await AsyncPoolClient.open(process.address, NAMESPACE) as client:
        await put_all(client)
        written = await on_disk(process)
        assert written >= CHAINS * BLOCKS - 24
        process.kill()
    await rpc.close()
    process = start()
    assert await on_disk(process) >= written
    old_life = PoolRpc(process.address, NodeIdentity(NODE_ID, before.incarnation))
    with pytest.raises(UnavailableError, match="was meant for"):
        await old_life.renew(1, 1000, _LIMIT_S)
    await old_life.close()
    rpc = PoolRpc(process.address)
    assert (await rpc.describe(_LIMIT_S)).incarnation > before.incarnation
    async with await AsyncPoolClient.open(process.address, NAMESPACE) as client:
        keys = [key for number in range(CHAINS) for key in client.keys(tokens_of(number))]
        assert sum(map(bool, await rpc.lookup(keys, _LIMIT_S))) >= written
        assert await get_all(client) > 0
        await put_all(client)
        assert await get_all(client) == CHAINS * BLOCKS
    await rpc.close()


async def test_second_node_over_the_same_directory_is_refused(start: Start) -> None:
    """Two owners of one log would overwrite each other's records."""
    start()
    with pytest.raises(AssertionError, match="did not start"):
        start("--id", "6e" * 16)


async def test_pooled_memory_takes_what_the_arena_has_no_room_for(tmp_path: Path) -> None:
    """A shared tier (CXL memory, here a file) stands below the arena as a disk does."""
    flags = ("--capacity", str(24 * 66 * KIB), "--shared", str(tmp_path / "pooled"), "--shared-capacity", "16MiB")
    process = NodeProcess(*flags)
    try:
        async with await AsyncPoolClient.open(process.address, NAMESPACE) as client:
            await put_all(client)
            assert await get_all(client) == CHAINS * BLOCKS
        admin = AdminRpc(process.address)
        names = [report.name for report in await admin.tiers(_LIMIT_S)]
        await admin.close()
        assert names == ["dram", "shared"]
    finally:
        assert process.stop() == 0, "".join(process.log)
