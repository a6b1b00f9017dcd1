"""TierFlow over a real pool and a slower tier that is a set."""

from collections.abc import Sequence
from hashlib import sha256

import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import NO_SPACE, Granted, PoolState, Reserve
from kvpool.pool.flow import FlowSettings, TierFlow

LENGTH = 64


class Below:
    """A slower tier: the keys it holds."""

    def __init__(self) -> None:
        self.keys: set[BlockKey] = set()

    def __call__(self, keys: Sequence[BlockKey]) -> list[bool]:
        return [key in self.keys for key in keys]


def chain(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(sha256(f"{name}/{i}".encode()).digest()) for i in range(count)]


def rig(blocks: int, **settings: object) -> tuple[PoolState, Below, TierFlow]:
    pool, below = PoolState(LENGTH * blocks, PrefixLru()), Below()
    flow = TierFlow(pool, FlowSettings(**settings), below)  # type: ignore[arg-type]
    pool.guard(flow.guards)
    return pool, below, flow


def put(pool: PoolState, flow: TierFlow, keys: list[BlockKey]) -> list[bool]:
    items = [Reserve(key, keys[i - 1] if i else None, 16 * i, LENGTH) for i, key in enumerate(keys)]
    got = pool.reserve(items, owner="w", lease_ns=100, now_ns=0)
    wrote = [item.key for item, grant in zip(items, got.grants, strict=True) if isinstance(grant, Granted)]
    flow.committed([key for key, ok in zip(wrote, pool.commit(got.lease_id, wrote, 0), strict=True) if ok], LENGTH * len(wrote))
    return [grant is not NO_SPACE for grant in got.grants]


def flush_all(pool: PoolState, below: Below, flow: TierFlow, *, pressed: bool = False, ok: bool = True) -> list[BlockKey]:
    done: list[BlockKey] = []
    for _ in range(100):
        flush = flow.next_flush(pressed=pressed, lease_ns=100, now_ns=0)
        if flush is None:
            return done
        if ok:
            below.keys.update(flush.keys)
        done += flush.keys
        flow.flushed(flush, [ok] * len(flush.keys), 0)
        pool.check()
    raise AssertionError("never done")


def test_write_through_writes_every_block_in_order_of_commit() -> None:
    """What was committed first is safe first."""
    pool, below, flow = rig(8)
    keys = chain("a", 3)
    put(pool, flow, keys)
    assert flush_all(pool, below, flow) == keys
    assert flow.counters == {"flushed": 3, "flushed_bytes": 3 * LENGTH, "unwritten": 0}
    assert flow.queued == 0


def test_block_not_yet_written_is_not_evicted_and_the_caller_is_told_to_wait() -> None:
    """Evicting what the disk doesn't have yet would lose an acknowledged block."""
    pool, below, flow = rig(2)
    first, second = chain("a", 2), chain("b", 1)
    put(pool, flow, first)
    item = Reserve(second[0], None, 0, LENGTH)
    got = pool.reserve([item], owner="w", lease_ns=100, now_ns=0)
    assert got.grants == (NO_SPACE,)
    assert got.waiting
    flush_all(pool, below, flow)
    got = pool.reserve([item], owner="w", lease_ns=100, now_ns=0)
    assert isinstance(got.grants[0], Granted)
    assert not got.waiting


def test_write_back_writes_the_coldest_before_they_are_needed() -> None:
    """Room is made without waiting because the next to leave are written down already; the young ones are not."""
    pool, below, flow = rig(10, write="back", clean_percent=20)
    old, young = chain("old", 5), chain("young", 5)
    put(pool, flow, old)
    put(pool, flow, young)
    written = flush_all(pool, below, flow)
    assert written == old[:-3:-1]
    assert put(pool, flow, chain("new", 2)) == [True, True]


def test_write_back_under_pressure_reaches_the_ancestors_of_a_cold_tail() -> None:
    """A long chain offers only its tail for eviction; writing tails one by one would make room one block at a time."""
    pool, below, flow = rig(8, write="back", clean_percent=50)
    keys = chain("a", 8)
    put(pool, flow, keys)
    assert flush_all(pool, below, flow, pressed=False) == keys[:3:-1]


def test_copy_that_the_tier_gave_up_is_written_again_before_the_block_leaves() -> None:
    """A log that reclaims its oldest segment must not cost the pool a block it still holds."""
    pool, below, flow = rig(4, clean_percent=100)
    keys = chain("a", 4)
    put(pool, flow, keys)
    flush_all(pool, below, flow)
    below.keys.discard(keys[3])
    assert flush_all(pool, below, flow, pressed=True) == [keys[3]]


def test_block_the_tier_refuses_may_leave_unwritten_after_some_tries() -> None:
    """A full or failing disk must never stop the pool."""
    pool, below, flow = rig(2)
    put(pool, flow, chain("a", 2))
    flush_all(pool, below, flow, ok=False)
    assert flow.counters["unwritten"] == 2
    assert put(pool, flow, chain("b", 1)) == [True]


def test_hot_admission_writes_only_what_was_used_often_enough() -> None:
    """A disk wears out; blocks nobody came back for need no place on it."""
    pool, below, flow = rig(4, admission="hot", hot_uses=2)
    keys = chain("a", 2)
    put(pool, flow, keys)
    assert flush_all(pool, below, flow) == []
    flow.used(keys)
    assert flow.used(keys[:1]) == keys[:1]
    assert flush_all(pool, below, flow) == keys[:1]
    assert put(pool, flow, chain("b", 4)) == [True] * 4


def test_flush_whose_lease_ended_counts_as_not_written() -> None:
    """Bytes that were free to be reused while they were copied prove nothing about the block."""
    pool, _below, flow = rig(4)
    put(pool, flow, chain("a", 1))
    flush = flow.next_flush(pressed=False, lease_ns=10, now_ns=0)
    assert flush is not None
    pool.tick(20)
    assert flow.flushed(flush, [True], 20) == list(flush.keys)
    assert flow.counters["flushed"] == 0
    assert flow.queued == 1


def test_block_discarded_during_its_flush_is_to_be_forgotten_below() -> None:
    """Damaged or unwanted: it must not come back from a slower tier."""
    pool, _below, flow = rig(4)
    keys = chain("a", 2)
    put(pool, flow, keys)
    flush = flow.next_flush(pressed=False, lease_ns=100, now_ns=0)
    assert flush is not None
    pool.discard(keys[1])
    assert flow.flushed(flush, [True, True], 1) == [keys[1]]


def test_batches_are_bounded_by_bytes() -> None:
    """One flush holds its blocks for as long as it takes, so it must be short."""
    pool, _below, flow = rig(8, batch_bytes=2 * LENGTH)
    put(pool, flow, chain("a", 5))
    flush = flow.next_flush(pressed=False, lease_ns=100, now_ns=0)
    assert flush is not None
    assert len(flush.keys) == 2


@pytest.mark.parametrize("bad", [{"write": "around"}, {"admission": "none"}, {"clean_percent": 0}, {"batch_bytes": 0}, {"hot_uses": 0}])
def test_settings_that_make_no_sense_are_refused(bad: dict[str, object]) -> None:
    """A typing error in a flag must not become a node without a disk."""
    with pytest.raises(ConfigError):
        FlowSettings(**bad)  # type: ignore[arg-type]
