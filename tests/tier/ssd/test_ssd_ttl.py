"""Time to live when the clock on the wall is set back or forward, and one rotten page that costs nothing."""

from random import Random

import numpy as np
import pytest

from kvpool.clock import ManualClock
from kvpool.testing.kill_ssd import data_of, key_of, record_of
from kvpool.testing.sim.disk import SimDisk
from kvpool.tier.ssd import PAGE, Piece, SsdTier
from kvpool.tier.ssd.format import SegmentPage, decode_segment, encode_segment
from kvpool.tier.ssd.lanes import aligned
from kvpool.units import KIB, MS, SECOND

SEGMENT = 256 * KIB
DAY_MS = 86_400_000
TTL_MS = 60_000


class Log:
    """A tier on a simulated disk whose wall clock can be set without time passing."""

    def __init__(self, slots: int = 4) -> None:
        self.disk, self.clock, self.set_ms, self.slots = SimDisk(1 << 24, Random(1)), ManualClock(1), DAY_MS * 20_000, slots
        self.tier = self.restart()

    def now_ms(self) -> int:
        return self.set_ms + self.clock.now_ns() // MS

    def restart(self) -> SsdTier:
        self.tier = SsdTier(
            self.disk,
            capacity_bytes=self.slots * SEGMENT,
            segment_bytes=SEGMENT,
            incarnation=1,
            lanes=0,
            clock=self.clock,
            wall_ms=self.now_ms,
        )
        return self.tier

    def put(self, number: int, ttl_ms: int = 0) -> bool:
        record = record_of(number)._replace(expires_ms=self.now_ms() + ttl_ms if ttl_ms else 0)
        return self.tier.put([record], self.clock.now_ns() + SECOND) == [True]

    def read(self, number: int) -> bool:
        buffer = np.zeros(data_of(number).size, np.uint8)
        found = self.tier.get([(key_of(number), buffer)], self.clock.now_ns() + SECOND)[0]
        assert not found or np.array_equal(buffer, data_of(number))
        assert found == (self.tier.find([key_of(number)], self.now_ms())[0] is not None)
        return found


def test_clock_set_back_in_one_life_does_not_lengthen_a_ttl() -> None:
    """Within a process time that passed counts, whatever the wall says."""
    log = Log()
    assert log.put(1, TTL_MS)
    assert log.put(2)
    log.set_ms -= DAY_MS
    log.clock.advance(TTL_MS * MS - 1)
    assert log.read(1)
    log.clock.advance(1)
    assert not log.read(1)
    assert log.read(2)
    assert log.tier.books().counters["expired"] == 1


@pytest.mark.parametrize("rewritten", [False, True])
def test_clock_set_back_over_a_restart_at_most_doubles_a_ttl(rewritten: bool) -> None:
    """The log keeps what was left of the ttl beside the date, also in a copy that compaction made under the wrong clock."""
    log = Log()
    assert log.put(1, TTL_MS)
    log.set_ms -= DAY_MS
    if rewritten:
        reclaimed = log.tier.books().counters["reinserted"]
        number = 100
        while log.tier.books().counters["reinserted"] == reclaimed:
            assert log.read(1)
            assert log.put(number)
            number += 1
    log.restart()
    assert log.tier.recovery.records > 0
    assert log.read(1)
    log.clock.advance(TTL_MS * MS)
    assert not log.read(1)


def test_clock_set_forward_and_back_again_refuses_nothing_afterwards() -> None:
    """A wrong date for a minute must not spoil the day after it."""
    log = Log()
    log.set_ms += DAY_MS
    assert log.put(1, TTL_MS)
    log.set_ms -= DAY_MS
    assert log.put(2, TTL_MS)
    assert log.read(2)
    log.clock.advance(TTL_MS * MS)
    assert not log.read(1)  # its date is a day away, its ttl is over
    assert not log.read(2)
    assert log.put(1, TTL_MS)


def test_one_rotten_byte_in_a_segments_first_page_loses_no_record() -> None:
    """The page says nothing that the group behind it does not say too."""
    log = Log()
    numbers = range(12)
    assert all(log.put(number) for number in numbers)
    log.tier.close()
    page = aligned(PAGE)
    for at in range(44):
        assert log.disk.read([Piece("segment-00000", 0, page)]) == [0]
        page[at] ^= 0x10
        assert log.disk.write([Piece("segment-00000", 0, page)]) == [0]
        log.restart()
        assert log.tier.recovery.damaged == 1
        assert [log.read(number) for number in numbers] == [True] * len(numbers)
        page[at] ^= 0x10
        assert log.disk.write([Piece("segment-00000", 0, page)]) == [0]


def test_first_page_of_another_segment_or_an_erased_one_is_not_mended() -> None:
    """A segment that was given up stays so, and a page that a disk put to the wrong place brings nothing back."""
    log = Log()
    assert log.put(1)
    page = aligned(PAGE)
    assert log.disk.read([Piece("segment-00000", 0, page)]) == [0]
    told = decode_segment(page.tobytes())
    for other in (bytes(PAGE), bytes(Random(1).randbytes(PAGE)), encode_segment(SegmentPage(told.serial + 1, told.life, SEGMENT))):
        page[:] = memoryview(other)
        assert log.disk.write([Piece("segment-00000", 0, page)]) == [0]
        log.restart()
        assert not log.read(1)


def test_entries_are_a_snapshot_that_later_changes_do_not_touch() -> None:
    """Whoever walks a million entries holds nobody up and sees one moment."""
    log = Log()
    assert all(log.put(number) for number in range(3))
    walk = log.tier.entries()
    first = next(walk)
    log.tier.remove([key_of(number) for number in range(3)])
    assert log.put(7)
    assert {first.key, *(entry.key for entry in walk)} == {key_of(number) for number in range(3)}
