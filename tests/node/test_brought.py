"""Bytes that come up from another tier: whose they are while they come, and who has checked them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kvpool.block import BlockKey
from kvpool.clock import MonotonicClock
from kvpool.node import tiers as module
from kvpool.node.handler import NodeHandler
from kvpool.node.tiers import Tiers
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import PoolState
from kvpool.pool.flow import FlowSettings
from kvpool.testing.board_twin import BoardTwin
from kvpool.tier import Arena
from kvpool.tier.memory import MemoryTier
from kvpool.tier.pages import Bytes
from kvpool.units import MS
from tests.node.conftest import LENGTH, SIZE, Rig, chain, twin, until


@pytest.fixture
def board() -> BoardTwin:
    return BoardTwin()


@pytest.fixture
async def rig(tmp_path: Path, board: BoardTwin) -> AsyncIterator[Rig]:
    """A node with a board, and a tier below."""
    arena, clock, below = Arena.create(tmp_path, "0" * 32, 1, 4 * SIZE), MonotonicClock(), twin(8 * SIZE)
    state = PoolState(arena.capacity, PrefixLru(), board=board)
    tiers = Tiers(state, arena, clock, below=below, beside=None, settings=FlowSettings())
    tiers.start()
    yield Rig(state, arena, tiers, NodeHandler(state, arena, clock, node_id="0" * 32, incarnation=1, tiers=tiers), below, None)
    await tiers.stop()
    state.check()
    arena.close()


async def written_down(rig: Rig, keys: Sequence[BlockKey]) -> None:
    """Blocks that only the tier below has."""
    await rig.put(keys)
    below = rig.below
    assert below is not None
    await until(lambda: all(below.find(keys)))
    await until(lambda: not any(view.dirty for key in keys if (view := rig.state.view(key)) is not None))
    for key in keys:
        assert rig.state.discard(key)


async def test_block_that_was_brought_is_unverified(rig: Rig, board: BoardTwin) -> None:
    """The tier vouches for what it was given. What it was given may have come by a wire, and then nobody has checked it so far."""
    keys = chain("a", 2)
    await written_down(rig, keys)
    assert await rig.get(keys) == [True, True]
    assert [board.records[key].unverified for key in keys] == [True, True]


async def test_place_of_a_slow_read_stays_reserved_until_the_read_has_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may take longer than any lease, and writes into the arena when it pleases."""
    keys, going = chain("a", 1), threading.Event()
    await written_down(rig, keys)
    real = MemoryTier.get

    def slow(self: MemoryTier, wanted: Sequence[tuple[BlockKey, Bytes]], deadline_ns: int) -> list[bool]:
        assert going.wait(20)
        return real(self, wanted, deadline_ns)

    monkeypatch.setattr(MemoryTier, "get", slow)
    monkeypatch.setattr(module, "_READ_LEASE_NS", 60 * MS)
    lease_id, places = await rig.handler.acquire("r", 1000, keys, patience_s=0.01)
    assert (lease_id, places) == (0, [None])
    for _ in range(20):
        await asyncio.sleep(0.01)
        rig.handler.tick()
    assert rig.state.books().pinned == SIZE
    assert rig.state.writing(keys[0])
    going.set()
    await until(lambda: rig.state.locate(keys[0]) is not None)
    assert await rig.get(keys) == [True]
    assert rig.state.counters()["reclaimed_leases"] == 0
    assert rig.arena.view(0, LENGTH).size == LENGTH
