"""The memory tier's own promises: expiry by the wall clock, a region that fails, and room that is pinned by readers."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.tier_kit import assert_balanced, data_of, key_of, read, record_of, soon
from kvpool.tier.memory import MemoryTier
from kvpool.tier.pages import Bytes
from kvpool.tier.region import BytesRegion, Region
from kvpool.units import KIB

CAPACITY = 64 * KIB


class Failing(BytesRegion):
    """A region whose device may fail, and that tells before it reads."""

    def __init__(self) -> None:
        super().__init__(CAPACITY)
        self.broken = ""
        self.before_read: Callable[[], None] = lambda: None

    def write(self, offset: int, data: Bytes) -> None:
        """Half the bytes arrive before the device fails."""
        if "write" in self.broken:
            super().write(offset, data[: data.size // 2])
            raise OSError(5, "device says no")
        super().write(offset, data)

    def read(self, offset: int, into: Bytes) -> None:
        """Fails, or waits for the test."""
        self.before_read()
        if "read" in self.broken:
            raise OSError(5, "device says no")
        super().read(offset, into)


def tier_over(region: Region, **more: object) -> MemoryTier:
    """A tier over all of `region`."""
    return MemoryTier(region, Allocator(region.capacity), PrefixLru(), **more)  # type: ignore[arg-type]


def test_expired_record_missed_dropped_and_its_room_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes while a record lies there: a read finds nothing, and a put that needs its room gets it without anyone's help."""
    now = [1000]
    tier = tier_over(BytesRegion(CAPACITY), wall_ms=lambda: now[0])
    half = CAPACITY // 2
    assert tier.put([record_of(1, half, expires_ms=2000), record_of(2, half, expires_ms=3000)], soon()) == [True, True]
    now[0] = 1999
    assert read(tier, [1], half) == [True]
    assert tier.put([record_of(3, half)], soon()) == [False]
    now[0] = 2000
    assert tier.put([record_of(3, half)], soon()) == [True]
    now[0] = 3000
    assert read(tier, [1, 2, 3], half) == [False, False, True]
    assert (tier.books().counters["expired"], tier.books().objects) == (2, 1)
    assert tier.put([record_of(2, half, expires_ms=4000)], soon()) == [True]
    now[0] = 4000
    assert tier.put([record_of(2, half, expires_ms=5000)], soon()) == [True]
    assert tier.find([key_of(2)])[0] is not None
    assert_balanced(tier)


def test_expiry_heap_stays_bounded_when_records_leave_before_their_time() -> None:
    """Records with a long ttl come and go a million times in a node's life."""
    tier = tier_over(BytesRegion(CAPACITY), wall_ms=lambda: 1)
    for number in range(500):
        tier.put([record_of(number, 10, expires_ms=10**12)], soon())
        tier.remove([key_of(number)])
    assert len(tier._index._expiries) <= 64 + 2


def test_region_that_fails_a_write_makes_the_tier_read_only_and_visible() -> None:
    """No error reaches the node; what was stored is still served; room of the failed put is not lost."""
    region = Failing()
    tier = tier_over(region)
    tier.put([record_of(1)], soon())
    used = tier.books().used_bytes
    region.broken = "write"
    assert tier.put([record_of(2), record_of(3)], soon()) == [False, False]
    books = tier.books()
    assert (books.state, books.used_bytes, books.objects) == ("read-only", used, 1)
    assert "device says no" in books.reason
    region.broken = ""
    assert tier.put([record_of(2), record_of(1)], soon()) == [False, True]
    assert read(tier, [1, 2]) == [True, False]
    assert_balanced(tier)


def test_region_that_fails_a_read_is_a_miss_and_the_record_stays() -> None:
    """A device that could not be read has not shown wrong bytes."""
    region = Failing()
    tier = tier_over(region)
    tier.put([record_of(1)], soon())
    region.broken = "read"
    assert read(tier, [1]) == [False]
    assert tier.verify(key_of(1)) is None
    region.broken = ""
    assert read(tier, [1]) == [True]
    assert (tier.books().counters["io_errors"], tier.books().counters["corrupt"]) == (2, 0)


def test_room_of_a_record_removed_during_a_read_is_not_given_out_before_its_end() -> None:
    """A reader in the middle of a copy gets the record's bytes, whole, though the record is gone when it ends."""
    region = Failing()
    tier = tier_over(region)
    tier.put([record_of(1, CAPACITY)], soon())
    reached, go = threading.Event(), threading.Event()
    region.before_read = lambda: (reached.set(), go.wait(30))[0]  # type: ignore[func-returns-value]
    into, answers = np.zeros(CAPACITY, np.uint8), list[bool]()
    thread = threading.Thread(target=lambda: answers.extend(tier.get([(key_of(1), into)], soon())))
    thread.start()
    assert reached.wait(30)
    assert tier.coldest(1) == []
    assert tier.remove([key_of(1)]) == 1
    assert tier.put([record_of(2, CAPACITY)], soon()) == [False]
    go.set()
    thread.join(30)
    assert answers == [True]
    assert np.array_equal(into, data_of(1, CAPACITY))
    assert tier.put([record_of(2, CAPACITY)], soon()) == [True]
    assert_balanced(tier)


def test_tier_of_impossible_shape_refused() -> None:
    """A space larger than its region would write outside it."""
    with pytest.raises(ConfigError, match="the region only"):
        MemoryTier(BytesRegion(64), Allocator(128), PrefixLru())
    with pytest.raises(ConfigError, match="max_objects"):
        tier_over(BytesRegion(64), max_objects=0)
    with pytest.raises(ConfigError, match="at least one byte"):
        BytesRegion(0)
