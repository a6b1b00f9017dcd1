"""The contract of a tier, as tests: subclass `TierKit` and provide a fixture `world`.

The world makes tiers and can damage what one of them stored, behind its back, as a failing device would. The kit talks about behaviour
only, so the same tests hold for memory, for a device and for a log on disk that makes its own room.
"""

import hashlib
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pytest

from kvpool.block import BlockKey
from kvpool.errors import ClosedError, ConfigError
from kvpool.tier.contract import COUNTERS, Entry, Record, Tier
from kvpool.tier.pages import Bytes
from kvpool.units import KIB, MIB, SECOND

PATIENCE_NS = 30 * SECOND
ODD_LENGTHS = (1, 2, 63, 64, 65, 511, 4095, 4096, 4097, 16 * KIB + 3, 100_003)
_DECADE_MS = 10 * 365 * 86_400_000


class TierWorld(Protocol):
    """Makes tiers of the kind under test, and damages them. It closes what it made at the end."""

    self_evicting: bool  # a full tier drops old records instead of refusing new ones
    smallest_bytes: int  # the least capacity for `open` that makes sense here

    def open(self, capacity_bytes: int, max_objects: int = 1024) -> Tier:
        """A new, empty tier of at least `capacity_bytes`, and not much more, for at most `max_objects` records."""
        ...

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        """Flip a bit of the stored bytes of `key`."""
        ...


def key_of(number: int) -> BlockKey:
    """A key, another one for each number."""
    return BlockKey(hashlib.sha256(b"tier kit %d" % number).digest())


def data_of(number: int, length: int) -> Bytes:
    """`length` bytes that only `number` has."""
    return np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)


def record_of(number: int, length: int = 1000, *, expires_ms: int = 0, parent: int | None = None, tenant: str = "") -> Record:
    """A record, the same one for each number and length."""
    above = None if parent is None else key_of(parent)
    return Record(key_of(number), above, 16 * number, data_of(number, length), expires_ms, 32 * number, tenant)


def soon(within_ns: int = PATIENCE_NS) -> int:
    """A deadline far enough away for anything that works."""
    return time.monotonic_ns() + within_ns


def read(tier: Tier, numbers: Sequence[int], length: int = 1000) -> list[bool]:
    """Per number whether the tier has its record; fails the test if it answers with other bytes than were put."""
    buffers = [np.full(length, 0xA5, np.uint8) for _ in numbers]
    found = tier.get([(key_of(n), b) for n, b in zip(numbers, buffers, strict=True)], soon())
    for number, buffer, hit in zip(numbers, buffers, found, strict=True):
        assert not hit or np.array_equal(buffer, data_of(number, length)), f"wrong bytes for {number}"
    return found


def assert_balanced(tier: Tier) -> None:
    """The books say what the entries say, and no limit is exceeded."""
    books, entries = tier.books(), list(tier.entries())
    assert books.objects == len(entries) <= books.max_objects
    assert sum(entry.length for entry in entries) <= books.used_bytes <= books.capacity_bytes
    assert set(COUNTERS) <= books.counters.keys()
    assert min(books.counters.values()) >= 0
    assert (books.state == "ok") == (books.reason == "")


class TierKit:
    """Tests every tier must pass."""

    def test_put_then_get_of_odd_lengths_gives_the_same_bytes(self, world: TierWorld) -> None:
        """Lengths are the caller's; rounding inside a tier must not show."""
        tier = world.open(max(world.smallest_bytes, MIB))
        assert tier.put([record_of(n, length) for n, length in enumerate(ODD_LENGTHS)], soon()) == [True] * len(ODD_LENGTHS)
        for number, length in enumerate(ODD_LENGTHS):
            assert read(tier, [number], length) == [True]
        assert_balanced(tier)

    def test_get_into_part_of_a_buffer_leaves_the_rest_alone(self, world: TierWorld) -> None:
        """The caller's buffer is a slice of its arena: a neighbour's bytes are next to it."""
        tier, arena = world.open(world.smallest_bytes), np.full(3000, 7, np.uint8)
        tier.put([record_of(1, 777)], soon())
        assert tier.get([(key_of(1), arena[1001:1778])], soon()) == [True]
        assert np.array_equal(arena[1001:1778], data_of(1, 777))
        assert bool((arena[:1001] == 7).all())
        assert bool((arena[1778:] == 7).all())

    def test_put_of_read_only_data_and_its_later_change_does_not_show(self, world: TierWorld) -> None:
        """A tier copies: after put the caller's memory is the caller's again."""
        tier, data = world.open(world.smallest_bytes), data_of(1, 1000)
        data.flags.writeable = False
        assert tier.put([Record(key_of(1), None, 0, data)], soon()) == [True]
        data.flags.writeable = True
        data[:] = 0
        assert read(tier, [1]) == [True]

    def test_put_again_is_a_success_and_stores_nothing_more(self, world: TierWorld) -> None:
        """Records are immutable, so two writers of one key are both right; also within one batch."""
        tier = world.open(world.smallest_bytes)
        assert tier.put([record_of(1), record_of(1)], soon()) == [True, True]
        before = tier.books()
        assert tier.put([record_of(1)], soon()) == [True]
        after = tier.books()
        assert (after.objects, after.used_bytes, after.counters["puts"]) == (1, before.used_bytes, 1)

    def test_miss_is_a_value_beside_hits(self, world: TierWorld) -> None:
        """One absent key in a batch spoils nothing."""
        tier = world.open(world.smallest_bytes)
        tier.put([record_of(1), record_of(3)], soon())
        assert read(tier, [1, 2, 3]) == [True, False, True]
        assert (tier.books().counters["hits"], tier.books().counters["misses"]) == (2, 1)
        assert tier.find([key_of(2)]) == [None]
        assert tier.verify(key_of(2)) is None
        assert tier.remove([key_of(2)]) == 0

    def test_empty_batches_do_nothing(self, world: TierWorld) -> None:
        """Callers need not special-case them."""
        tier = world.open(world.smallest_bytes)
        assert [tier.put([], soon()), tier.get([], soon())] == [[], []]
        assert tier.find([]) == []
        assert tier.coldest(0) == []
        assert list(tier.entries()) == []
        assert tier.remove([]) == 0

    def test_get_with_a_buffer_of_another_length_misses(self, world: TierWorld) -> None:
        """Half a frame is no frame, and bytes behind a frame are nobody's."""
        tier = world.open(world.smallest_bytes)
        tier.put([record_of(1)], soon())
        for length in (0, 1, 999, 1001):
            assert tier.get([(key_of(1), np.zeros(length, np.uint8))], soon()) == [False]
        assert read(tier, [1]) == [True]

    def test_find_tells_all_about_a_record_without_its_bytes(self, world: TierWorld) -> None:
        """What a node needs to take a record back, and what an operator asks."""
        tier, later = world.open(world.smallest_bytes), time.time_ns() // 1_000_000 + _DECADE_MS
        tier.put([record_of(2, 300, expires_ms=later, parent=1, tenant="acme")], soon())
        wanted = Entry(key_of(2), key_of(1), 32, 300, later, 64, "acme")
        assert tier.find([key_of(1), key_of(2)]) == [None, wanted]
        assert list(tier.entries()) == [wanted]

    def test_find_and_verify_count_no_use(self, world: TierWorld) -> None:
        """A probe is no reader."""
        tier = world.open(world.smallest_bytes)
        tier.put([record_of(1)], soon())
        tier.find([key_of(1), key_of(2)])
        assert tier.verify(key_of(1)) is True
        assert (tier.books().counters["hits"], tier.books().counters["misses"]) == (0, 0)

    def test_expired_record_not_found_and_not_taken(self, world: TierWorld) -> None:
        """A ttl holds in every tier."""
        tier, later = world.open(world.smallest_bytes), time.time_ns() // 1_000_000 + _DECADE_MS
        assert tier.put([record_of(1, expires_ms=1), record_of(2, expires_ms=later)], soon()) == [False, True]
        assert tier.find([key_of(1)]) == [None]
        found = [tier.find([key_of(2)], now_ms)[0] is not None for now_ms in (later - 1, later, later + 1)]
        assert found == [True, False, False]
        assert_balanced(tier)

    def test_removed_record_is_gone_and_its_room_free(self, world: TierWorld) -> None:
        """Over and over again, so that a leak of room would show."""
        tier = world.open(world.smallest_bytes)
        used = tier.books().used_bytes
        length = tier.books().capacity_bytes // 8
        for number in range(40):
            assert tier.put([record_of(number, length)], soon()) == [True]
            assert tier.remove([key_of(number), key_of(number), key_of(99)]) == 1
            assert read(tier, [number], length) == [False]
        assert tier.put([record_of(0, length)], soon()) == [True]
        assert read(tier, [0], length) == [True]
        tier.remove([key_of(0)])
        assert tier.books().objects == 0
        assert tier.books().counters["removed"] == 41
        if not world.self_evicting:
            assert tier.books().used_bytes == used

    def test_full_tier_refuses_or_makes_room_and_stays_ok(self, world: TierWorld) -> None:
        """Full is a normal state: no error, no lost books, and whatever was acknowledged last can be read."""
        tier = world.open(world.smallest_bytes)
        length = tier.books().capacity_bytes // 6
        stored = [tier.put([record_of(number, length)], soon())[0] for number in range(20)]
        assert tier.books().state == "ok"
        assert_balanced(tier)
        found = read(tier, range(20), length)
        if world.self_evicting:
            assert stored[-1]
            assert found[-1]
            assert not all(found)
        else:
            assert stored == found
            assert stored[0]
            assert not stored[-1]
            assert tier.books().counters["refused"] == stored.count(False)

    def test_record_larger_than_the_tier_refused_and_nothing_lost(self, world: TierWorld) -> None:
        """It can never fit, so no room is made for it."""
        tier = world.open(world.smallest_bytes)
        tier.put([record_of(1)], soon())
        assert tier.put([record_of(2, tier.books().capacity_bytes + 1)], soon()) == [False]
        assert read(tier, [1]) == [True]
        assert tier.books().state == "ok"

    def test_object_limit_holds_when_bytes_do_not_run_out(self, world: TierWorld) -> None:
        """Metadata is bounded: a million tiny records are a limit too."""
        tier = world.open(world.smallest_bytes, max_objects=5)
        stored = [tier.put([record_of(number, 10)], soon())[0] for number in range(12)]
        assert tier.books().max_objects == 5
        assert tier.books().objects <= 5
        assert_balanced(tier)
        if not world.self_evicting:
            assert stored == [True] * 5 + [False] * 7
            tier.remove([key_of(0)])
            assert tier.put([record_of(12, 10)], soon()) == [True]

    def test_coldest_names_enough_and_removing_them_makes_the_room(self, world: TierWorld) -> None:
        """Who needs room asks for victims and removes them; the one just read is not among the first."""
        tier = world.open(world.smallest_bytes)
        length = tier.books().capacity_bytes // 10
        numbers = range(20)
        kept = [number for number in numbers if tier.put([record_of(number, length)], soon())[0]]
        assert read(tier, kept[:1], length) == [True] or world.self_evicting
        victims = tier.coldest(2 * length)
        if world.self_evicting:
            assert all(tier.find([key])[0] is not None for key in victims)
            return
        assert len(victims) >= 2
        assert key_of(kept[0]) not in victims
        assert tier.books().objects == len(kept)
        assert tier.remove(victims) == len(victims)
        assert tier.put([record_of(100, length), record_of(101, length)], soon()) == [True, True]

    def test_corrupt_record_is_a_miss_dropped_and_counted(self, world: TierWorld) -> None:
        """A wrong byte is never returned, not even once, and the key may be stored anew."""
        tier = world.open(world.smallest_bytes)
        tier.put([record_of(1), record_of(2)], soon())
        world.corrupt(tier, key_of(1))
        assert read(tier, [1, 2]) == [False, True]
        assert tier.find([key_of(1)]) == [None]
        assert (tier.books().counters["corrupt"], tier.books().objects) == (1, 1)
        assert tier.put([record_of(1)], soon()) == [True]
        assert read(tier, [1]) == [True]
        assert_balanced(tier)

    def test_watcher_is_told_of_all_that_comes_and_goes(self, world: TierWorld) -> None:
        """Whoever keeps a table of what a node holds must not have to ask: puts, room made, removals, damage and age are all told."""
        tier = world.open(2 * world.smallest_bytes, 8)
        told: dict[BlockKey, Entry] = {}

        def watcher(key: BlockKey, entry: Entry | None) -> None:
            if entry is None:
                assert told.pop(key, None) is not None, "told to be gone although it was not there"
            else:
                assert entry.key == key
                told[key] = entry

        def agrees() -> bool:
            return list(told.values()) == list({entry.key: entry for entry in tier.entries()}.values())

        tier.watch(watcher)
        for number in range(12):  # more than it takes
            tier.put([record_of(number, parent=number + 1), record_of(number)], soon())
        assert agrees()
        assert len(told) == 8
        kept = list(told)
        tier.remove([kept[0], kept[0], key_of(99)])
        world.corrupt(tier, kept[1])
        assert tier.verify(kept[1]) is False
        assert kept[0] not in told
        assert kept[1] not in told
        soon_over = record_of(50, expires_ms=int(time.time() * 1000) + 50)
        assert tier.put([soon_over], soon()) == [True]
        assert soon_over.key in told
        time.sleep(0.06)
        assert read(tier, [50]) == [False]
        assert soon_over.key not in told
        assert agrees()
        tier.remove(list(told))
        assert told == {}

    def test_verify_tells_sound_from_corrupt_and_drops_the_latter(self, world: TierWorld) -> None:
        """The scrub finds what no reader has met yet."""
        tier = world.open(world.smallest_bytes)
        tier.put([record_of(1), record_of(2)], soon())
        world.corrupt(tier, key_of(2))
        assert [tier.verify(key_of(n)) for n in (1, 2)] == [True, False]
        assert tier.verify(key_of(2)) is None
        assert tier.books().counters["corrupt"] == 1
        assert read(tier, [1, 2]) == [True, False]

    def test_deadline_in_the_past_moves_nothing(self, world: TierWorld) -> None:
        """Too late is a miss or a refusal, and the tier lives on."""
        tier = world.open(world.smallest_bytes)
        past = time.monotonic_ns() - 1
        assert tier.put([record_of(1)], past) == [False]
        assert tier.find([key_of(1)]) == [None]
        tier.put([record_of(1)], soon())
        assert tier.get([(key_of(1), np.zeros(1000, np.uint8))], past) == [False]
        assert read(tier, [1]) == [True]
        assert tier.books().state == "ok"

    def test_malformed_record_refused_before_anything_is_stored(self, world: TierWorld) -> None:
        """The caller's mistake, so an error; not even the good record before it is stored."""
        tier, good, words = world.open(world.smallest_bytes), record_of(1), np.zeros(4, np.uint16)
        for bad in (
            good._replace(key=BlockKey(b"short")),
            good._replace(parent=BlockKey(b"short")),
            good._replace(data=np.zeros(0, np.uint8)),
            good._replace(data=words),  # type: ignore[arg-type]
            good._replace(data=data_of(1, 100)[::2]),
            good._replace(depth=-1),
        ):
            with pytest.raises(ConfigError):
                tier.put([good, bad], soon())
        assert tier.books().objects == 0

    def test_readers_during_puts_and_removes_never_see_wrong_bytes(self, world: TierWorld) -> None:
        """Room of a removed record is used again at once; a reader in the middle of it gets its own bytes or a miss."""
        tier = world.open(world.smallest_bytes)
        length = min(200_000, tier.books().capacity_bytes // 6)
        stop, failures = threading.Event(), list[BaseException]()

        def work() -> None:
            try:
                while not stop.is_set():
                    read(tier, range(8), length)
            except BaseException as error:
                failures.append(error)

        readers = [threading.Thread(target=work) for _ in range(3)]
        for thread in readers:
            thread.start()
        try:
            for turn in range(60):
                tier.put([record_of(turn % 8, length), record_of((turn + 3) % 8, length)], soon())
                tier.remove([key_of((turn + 1) % 8), key_of((turn + 5) % 8)])
                list(tier.entries())
        finally:
            stop.set()
            for thread in readers:
                thread.join(PATIENCE_NS / SECOND)
        assert not any(thread.is_alive() for thread in readers)
        assert failures == []
        assert tier.books().counters["corrupt"] == 0
        assert_balanced(tier)

    def test_use_after_close_refused_and_closing_twice_is_fine(self, world: TierWorld) -> None:
        """A closed tier says so instead of failing in some other way."""
        tier = world.open(world.smallest_bytes)
        tier.put([record_of(1)], soon())
        tier.close()
        tier.close()
        for call in (
            lambda: tier.put([record_of(2)], soon()),
            lambda: tier.get([(key_of(1), np.zeros(1000, np.uint8))], soon()),
            lambda: tier.find([key_of(1)]),
            lambda: tier.remove([key_of(1)]),
            lambda: tier.coldest(1),
            lambda: list(tier.entries()),
            lambda: tier.verify(key_of(1)),
            lambda: tier.books(),
        ):
            with pytest.raises(ClosedError):
                call()
