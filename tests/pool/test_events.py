"""The numbered changes of what a node holds."""

import random
from collections.abc import Sequence
from hashlib import sha256

import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import PoolState, Reserve
from kvpool.pool.events import KvEvents, Watch
from kvpool.pool.resident import Resident, State
from kvpool.request.events import BELOW, BESIDE, DRAM, MAX_BATCH, EventBatch


def key_of(number: int) -> BlockKey:
    return BlockKey(sha256(b"%d" % number).digest())


def put(events: KvEvents, numbers: range, tier: int = DRAM) -> None:
    for number in numbers:
        events.stored(tier, key_of(number), key_of(number - 1) if number else None, 16 * number)


def drain(reader: Watch) -> list[EventBatch]:
    batches = []
    while (batch := reader.next()) is not None:
        batches.append(batch)
    return batches


def test_block_moving_between_tiers_is_an_event_with_the_new_tier_and_copies_are_none() -> None:
    """A reader wants to know the best place; only when that changes is there something to tell."""
    events = KvEvents(7)
    reader = events.watch(0, 0)
    assert [(batch.part, batch.last, batch.stored) for batch in drain(reader)] == [(1, True, ())]
    key = key_of(1)
    steps = (
        (events.stored, DRAM, DRAM), (events.stored, BELOW, None), (events.stored, DRAM, None), (events.removed, DRAM, BELOW),
        (events.stored, BESIDE, BESIDE), (events.removed, BELOW, None), (events.removed, BELOW, None), (events.stored, DRAM, DRAM),
        (events.removed, BESIDE, None),
    )  # fmt: skip
    for step, tier, told in steps:
        if step == events.stored:
            events.stored(tier, key, None, 0)
        else:
            events.removed(tier, key)
        assert [batch.stored for batch in drain(reader)] == ([] if told is None else [((key, None, 0, told),)])
    events.removed(DRAM, key)
    (gone,) = drain(reader)
    assert (gone.stored, gone.removed, gone.after, gone.sequence, gone.incarnation) == ((), (key,), 4, 5, 7)
    assert len(events) == 0


def test_batch_names_each_block_once_as_it_is_at_its_end() -> None:
    """What came and went between two looks is one word, not a story."""
    events = KvEvents(1)
    reader = events.watch(0, 0)
    drain(reader)
    put(events, range(3))
    events.removed(DRAM, key_of(1))
    events.removed(DRAM, key_of(2))
    put(events, range(2, 3))
    (batch,) = drain(reader)
    assert (batch.after, batch.sequence) == (0, 6)
    assert {one[0] for one in batch.stored} == {key_of(0), key_of(2)}
    assert batch.removed == (key_of(1),)


def test_position_is_resumed_exactly_while_it_is_remembered() -> None:
    """A consumer that comes back gets what it missed, and a snapshot only when that is forgotten, or of another life, or of the future."""
    events = KvEvents(1, ring=10)
    put(events, range(25))
    assert [batch.part for batch in drain(events.watch(1, 15))] == [0]
    (batch,) = drain(events.watch(1, 22))
    assert [one[0] for one in batch.stored] == [key_of(number) for number in (22, 23, 24)]
    assert drain(events.watch(1, 25)) == []
    for incarnation, sequence in ((1, 14), (1, 26), (2, 25), (1, 0)):
        (batch,) = drain(events.watch(incarnation, sequence))
        assert (batch.part, batch.last, batch.sequence, len(batch.stored)) == (1, True, 25, 25)


def test_reader_behind_the_ring_begins_anew_and_costs_nothing_meanwhile() -> None:
    """Nothing is kept for one that doesn't read."""
    events = KvEvents(1, ring=10)
    reader = events.watch(0, 0)
    drain(reader)
    put(events, range(50))
    (batch,) = drain(reader)
    assert (batch.part, batch.last, batch.sequence, len(batch.stored)) == (1, True, 50, 50)


def test_snapshot_in_parts_while_blocks_come_and_go_is_the_state_at_its_end() -> None:
    """Nothing stands still for a snapshot: with its last part the consumer has exactly what is held at that number."""
    events, rng = KvEvents(1), random.Random(3)
    put(events, range(4 * MAX_BATCH))
    reader = events.watch(0, 0)
    held: dict[BlockKey, object] = {}
    parts: list[EventBatch] = []
    fresh = 10**6
    while not parts or not parts[-1].last:
        batch = reader.next()
        assert batch is not None
        parts += [batch] if batch.part else []
        for key in batch.removed:
            held.pop(key, None)
        held.update((one[0], one) for one in batch.stored)
        if batch.part and not batch.last:
            for key in rng.sample(list(events.held()), 500):
                events.removed(DRAM, key)
            put(events, range(fresh, fresh + 700))
            fresh += 700
    assert [batch.part for batch in parts] == list(range(1, len(parts) + 1))
    assert max(len(batch.stored) for batch in parts) <= MAX_BATCH
    assert held == events.held()
    assert (reader.next(), reader.idle().sequence) == (None, events.sequence)


def test_slots_of_blocks_that_went_are_used_again() -> None:
    """The table is as long as the node ever was full, not as what has passed through it."""
    events = KvEvents(1)
    for turn in range(5):
        put(events, range(100 * turn, 100 * turn + 100))
        for number in range(100 * turn, 100 * turn + 100):
            events.removed(DRAM, key_of(number))
    put(events, range(100))
    assert len(events._slots) == 100


def test_pool_tells_its_watch_of_every_block_that_becomes_readable_or_stops_being_so() -> None:
    """Commit, eviction, expiry, discard, and discard under a lease: the one who watches knows what `lookup` would say."""
    held: set[BlockKey] = set()

    def watch(blocks: Sequence[Resident]) -> None:
        for block in blocks:
            (held.add if block.state is State.COMMITTED else held.discard)(block.key)

    pool = PoolState(64 * 4, PrefixLru(), watch=watch)

    def store(numbers: range, ttl_ns: int = 0) -> None:
        got = pool.reserve([Reserve(key_of(n), None, 0, 64, ttl_ns) for n in numbers], owner="w", lease_ns=10, now_ns=0)
        pool.commit(got.lease_id, [key_of(n) for n in numbers], 0)

    def agree() -> bool:
        return held == set(pool.committed_keys())

    store(range(4))
    assert len(held) == 4
    store(range(4, 6))  # two are evicted
    assert len(held) == 4
    assert agree()
    lease = pool.acquire([key_of(5)], owner="r", lease_ns=10, now_ns=1).lease_id
    assert pool.discard(key_of(5))
    assert key_of(5) not in held
    pool.release(lease, 2)
    assert pool.discard(key_of(4))
    assert len(held) == 2
    store(range(6, 7), ttl_ns=5)
    assert key_of(6) in held
    pool.tick(20)
    assert key_of(6) not in held
    assert agree()
    assert not pool.discard(key_of(99))


def test_ring_without_room_is_refused() -> None:
    """A node that remembers nothing could only ever send snapshots."""
    with pytest.raises(ConfigError, match="at least one change"):
        KvEvents(1, ring=0)
