"""Blocks on their way between the arena and other tiers, in one node."""

import asyncio
from collections.abc import Sequence
from typing import Any

from kvpool.block import BlockKey
from kvpool.clock import MonotonicClock
from kvpool.pool.flow import FlowSettings
from kvpool.request.events import BELOW, BESIDE, DRAM
from kvpool.request.pool import Outcome
from kvpool.tier.contract import Record

from .conftest import LENGTH, Rigs, chain, until


async def test_chain_larger_than_the_arena_is_all_kept_with_a_tier_below(rigs: Rigs) -> None:
    """The promise of a second tier: what was acknowledged and pushed out of memory is still there, whole."""
    rig = rigs(4, below=64)
    chains = [chain(f"c{i}", 2) for i in range(10)]
    for keys in chains:
        assert await rig.put(keys) == [Outcome.GRANTED] * 2
    for keys in chains:
        assert await rig.get(keys) == [True] * 2
    counters = rig.handler.describe().counters
    assert counters["flushed"] >= 16
    assert counters["unwritten"] == 0
    assert counters["brought"] > 0


async def test_lookup_says_which_tier_holds_a_block(rigs: Rigs) -> None:
    """A router weighs a block on disk differently from one in memory."""
    rig = rigs(2, below=8)
    old, new = chain("old", 2), chain("new", 2)
    await rig.put(old)
    await rig.put(new)
    assert list(rig.handler.lookup([*old, *new, *chain("none", 1)])) == [BELOW, BELOW, DRAM, DRAM, 0]


async def test_block_that_only_a_slower_tier_has_needs_no_second_writing(rigs: Rigs) -> None:
    """EXISTS is success for a writer: it sends no bytes."""
    rig = rigs(2, below=8)
    old = chain("old", 2)
    await rig.put(old)
    await rig.put(chain("new", 2))
    assert await rig.put(old) == [Outcome.EXISTS] * 2


async def test_many_readers_of_one_block_below_cost_one_reading(rigs: Rigs) -> None:
    """A thundering herd on a cold prefix must not multiply disk reads."""
    rig = rigs(4, below=16)
    old = chain("old", 2)
    await rig.put(old)
    await rig.put(chain("new", 4))
    assert rig.below is not None
    before = rig.below.books().counters["hits"]
    answers = await asyncio.gather(*(rig.get(old) for _ in range(8)))
    assert answers == [[True, True]] * 8
    assert rig.below.books().counters["hits"] - before == 2


async def test_scan_over_the_slow_tier_leaves_the_working_set_in_memory(rigs: Rigs) -> None:
    """Blocks brought for one reading pass through: they make room for each other before anything in use leaves."""
    rig = rigs(8, below=64)
    scanned = [chain(f"s{i}", 1) for i in range(10)]
    for keys in scanned:
        await rig.put(keys)
    hot = chain("hot", 5)
    await rig.put(hot)
    await rig.get(hot)
    for keys in scanned:
        assert await rig.get(keys) == [True]
    assert list(rig.handler.lookup(hot)) == [DRAM] * 5


async def test_block_brought_again_is_admitted(rigs: Rigs) -> None:
    """What keeps coming back belongs in memory."""
    rig = rigs(4, below=64)
    keys = chain("a", 1)
    await rig.put(keys)
    await rig.put(chain("fill", 4))
    for _ in range(3):
        await rig.get(keys)
    for i in range(4):
        other = chain(f"o{i}", 1)
        await rig.put(other)
        await rig.get(keys)
    assert list(rig.handler.lookup(keys)) == [DRAM]


async def test_damaged_block_is_dropped_from_every_tier(rigs: Rigs) -> None:
    """What was written down may have been copied from the damage: it must not come back."""
    rig = rigs(4, below=16)
    keys = chain("a", 1)
    await rig.put(keys)
    below = rig.below
    assert below is not None
    await until(lambda: below.find(keys)[0] is not None)
    place = rig.state.locate(keys[0])
    assert place is not None
    rig.arena.view(*place)[-1] ^= 1
    lease_id, _ = await rig.handler.acquire("r", 1000, keys)
    rig.handler.release(lease_id, keys)
    await until(lambda: below.find(keys)[0] is None)
    assert await rig.get(keys) == [False]
    assert rig.handler.describe().counters["corrupt"] == 1


class Broken:
    """A tier that refuses everything, as a full or failing disk does."""

    def __init__(self, tier: Any) -> None:
        self._tier = tier
        self.broken = False

    def put(self, records: Sequence[Record], deadline_ns: int) -> list[bool]:
        return [False] * len(records) if self.broken else self._tier.put(records, deadline_ns)

    def books(self) -> Any:
        from dataclasses import replace

        books = self._tier.books()
        return replace(books, state="read-only", reason="no space left on device") if self.broken else books

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)


async def test_failing_tier_degrades_the_node_to_memory_and_comes_back(rigs: Rigs) -> None:
    """A full disk costs the tier, never the service; when it is well again blocks flow down again."""
    rig = rigs(4, below=64)
    flusher = rig.tiers.flusher
    assert flusher is not None
    broken = Broken(rig.below)
    flusher.tier = rig.tiers.below = broken
    broken.broken = True
    for i in range(6):
        assert await rig.put(chain(f"c{i}", 2)) == [Outcome.GRANTED] * 2
    assert rig.handler.describe().counters["evicted"] >= 8
    broken.broken = False
    last = chain("last", 2)
    await rig.put(last)
    await until(lambda: all(entry is not None for entry in broken.find(last)))


async def test_tier_that_raises_stops_neither_the_node_nor_the_writing(rigs: Rigs) -> None:
    """A defect in a tier costs its copies; a loop that died of it would leave the pool full of blocks that may not leave."""
    rig = rigs(4, below=64)
    flusher = rig.tiers.flusher
    assert flusher is not None
    real, calls = flusher.tier.put, 0

    def put(records: Sequence[Record], deadline_ns: int) -> list[bool]:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise ValueError("a defect")
        return real(records, deadline_ns)

    flusher.tier.put = put  # type: ignore[method-assign]
    for i in range(6):
        assert await rig.put(chain(f"c{i}", 2)) == [Outcome.GRANTED] * 2
    below = rig.below
    assert below is not None
    await until(lambda: all(entry is not None for entry in below.find(chain("c5", 2))))


async def test_reader_that_hangs_up_while_blocks_come_holds_nothing(rigs: Rigs) -> None:
    """A cancelled request gives back at once what it held for its own sake."""
    rig = rigs(4, below=16)
    old, new = chain("old", 2), chain("new", 4)
    await rig.put(old)
    await rig.put(new)
    reading = asyncio.Event()

    async def never(keys: Sequence[BlockKey], deadline_ns: int) -> None:
        reading.set()
        await asyncio.Event().wait()

    rig.tiers.bring = never  # type: ignore[method-assign]
    call = asyncio.create_task(rig.handler.acquire("r", 10_000, [*old, *new], patience_s=30.0))
    async with asyncio.timeout(20):
        await reading.wait()
    owners = {one.owner for key in new for one in rig.state.view(key, holders=True).holders}  # type: ignore[union-attr]
    assert "r" in owners
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    owners = {one.owner for key in new for one in rig.state.view(key, holders=True).holders}  # type: ignore[union-attr]
    assert "r" not in owners


async def test_full_pool_waits_for_the_tier_and_gives_up_at_the_deadline(rigs: Rigs) -> None:
    """Nothing hangs: a reserve that would have to drop unwritten blocks answers NO_SPACE when its patience ends."""
    rig = rigs(2, below=8)
    assert rig.tiers.flusher is not None
    rig.tiers.flusher.flow.next_flush = lambda **_: None  # type: ignore[method-assign]
    await rig.put(chain("a", 2))
    start_ns = MonotonicClock().now_ns()
    assert await rig.put(chain("b", 1), patience_s=0.05) == [Outcome.NO_SPACE]
    assert MonotonicClock().now_ns() > start_ns
    rig.state.guard(False)


async def test_hot_blocks_are_lifted_beside_and_sink_back_when_it_is_full(rigs: Rigs) -> None:
    """GPU memory holds what is used most; what it gives up goes back to memory, not away."""
    rig = rigs(8, below=64, beside=2, settings=FlowSettings(hot_uses=2))
    beside = rig.beside
    assert beside is not None
    first, second = chain("f", 2), chain("s", 2)
    for keys in (first, second):
        await rig.put(keys)
        for _ in range(2):
            await rig.get(keys)
        await until(lambda keys=keys: all(entry is not None for entry in beside.find(keys)))  # type: ignore[misc]
    assert rig.handler.describe().counters["sunk"] == 2
    await until(lambda: not rig.tiers._lifting)  # every block may be lifted again
    assert await rig.get(first) == [True, True]
    rig.state.guard(False)
    for key in second:
        rig.state.discard(key)
    assert list(rig.handler.lookup(second)) == [BESIDE] * 2
    assert await rig.get(second) == [True, True]


async def test_what_is_queued_is_written_down_at_the_end(rigs: Rigs) -> None:
    """A node that is stopped in order loses nothing it acknowledged."""
    rig = rigs(8, below=64)
    keys: list[BlockKey] = chain("a", 8)
    await rig.put(keys)
    below = rig.below
    assert below is not None
    assert rig.tiers.flusher is not None
    await rig.tiers.flusher.stop()
    assert all(entry is not None and entry.length == LENGTH for entry in below.find(keys))
