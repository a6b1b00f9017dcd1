"""A node's answers to an operator, over the wire: the same contract that the twin keeps, and what only a node with tiers can show."""

from collections.abc import AsyncIterator, Sequence

import grpc.aio
import pytest

from kvpool.block import BlockKey
from kvpool.clock import MonotonicClock
from kvpool.node.admin import ARENA, NodeAdmin
from kvpool.request.admin import EvictOutcome, PinOutcome
from kvpool.testing.admin_kit import AdminKit
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.admin_server import add_admin
from kvpool.wire.channel import SERVER_OPTIONS, bind

from .conftest import Rig, Rigs, chain

_LIMIT_S = 20.0


class NodeWorld:
    """A node's parts behind a real server."""

    tier = ARENA

    def __init__(self, rig: Rig, rpc: AdminRpc) -> None:
        self.rig, self.rpc, self.identity = rig, rpc, rig.handler.identity
        self._chains = 0

    async def put(self, count: int) -> list[bytes]:
        self._chains += 1
        keys = chain(f"c{self._chains}", count)
        await self.rig.put(keys)
        return list(keys)

    async def lease(self, keys: Sequence[bytes]) -> int:
        return (await self.rig.handler.acquire("reader", 60_000, keys))[0]

    async def release(self, lease_id: int) -> None:
        self.rig.handler.release(lease_id, ())

    async def damage(self, key: bytes) -> None:
        place = self.rig.state.locate(BlockKey(key))
        assert place is not None
        self.rig.arena.view(*place)[-1] ^= 1


async def serve(rig: Rig) -> AsyncIterator[NodeWorld]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_admin(server, NodeAdmin(rig.handler, rig.state, rig.arena, rig.tiers, MonotonicClock()))
    rpc = AdminRpc(bind(server, "127.0.0.1:0"), rig.handler.identity)
    await server.start()
    try:
        yield NodeWorld(rig, rpc)
    finally:
        await rpc.close()
        await server.stop(None)


@pytest.fixture
async def world(rigs: Rigs) -> AsyncIterator[NodeWorld]:
    async for one in serve(rigs(64)):
        yield one


@pytest.fixture
async def tiered(rigs: Rigs) -> AsyncIterator[NodeWorld]:
    async for one in serve(rigs(4, below=64)):
        yield one


class TestNode(AdminKit):
    """A real node."""


async def test_block_on_a_slower_tier_is_shown_evicted_and_verified_there(tiered: NodeWorld) -> None:
    """An operator sees a block wherever it is, and what is evicted is gone from everywhere."""
    old = await tiered.put(2)
    await tiered.put(4)
    (first, _) = await tiered.rpc.inspect(old, _LIMIT_S)
    assert [place.name for place in first.tiers] == ["memory"]
    report = await tiered.rpc.verify("memory", _LIMIT_S, cursor="", max_bytes=1 << 20)
    assert (report.checked >= 2, report.corrupt, report.cursor) == (True, (), "")
    assert await tiered.rpc.evict(old, _LIMIT_S) == [EvictOutcome.EVICTED] * 2
    assert await tiered.rig.get([BlockKey(key) for key in old]) == [False, False]


async def test_pin_of_a_block_on_a_slower_tier_brings_it_up_and_keeps_it(tiered: NodeWorld) -> None:
    """To pin a prefix before an event is to have it in memory then."""
    old = await tiered.put(2)
    await tiered.put(4)
    assert await tiered.rpc.pin(old, _LIMIT_S, owner="ops", duration_ms=60_000, hard=True) == [PinOutcome.PINNED] * 2
    for _ in range(3):
        await tiered.put(2)
    assert [block.tiers[0].name for block in await tiered.rpc.inspect(old, _LIMIT_S)] == [ARENA] * 2


async def test_tiers_are_listed_with_their_books(tiered: NodeWorld) -> None:
    """`kvpool tiers` is where a failing disk shows."""
    await tiered.put(4)
    await tiered.put(4)
    arena, below = await tiered.rpc.tiers(_LIMIT_S)
    assert (arena.name, arena.state, arena.objects) == (ARENA, "ok", 4)
    assert (below.name, below.state) == ("memory", "ok")
    assert below.objects >= 4
    assert arena.counters["flushed"] >= 4
