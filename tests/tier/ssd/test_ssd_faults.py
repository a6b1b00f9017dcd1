"""A device that is full, read-only or broken, limits, expiry, many threads: the tier degrades visibly and comes back."""

import errno
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvpool.clock import ManualClock
from kvpool.errors import ConfigError
from kvpool.testing.kill_ssd import data_of, key_of, record_of
from kvpool.testing.sim.disk import SimDisk
from kvpool.tier.ssd import FileDisk, Piece, SsdTier
from kvpool.tier.ssd.root import NAME
from kvpool.units import KIB, SECOND

SEGMENT = 256 * KIB


def soon() -> int:
    return time.monotonic_ns() + 30 * SECOND


def reads(tier: SsdTier, number: int, deadline_ns: int) -> bool:
    buffer = np.zeros(data_of(number).size, np.uint8)
    found = tier.get([(key_of(number), buffer)], deadline_ns)[0]
    assert not found or np.array_equal(buffer, data_of(number))
    return found


class CountedDisk(SimDisk):
    """Counts tries to write."""

    writes = 0

    def write(self, pieces: Sequence[Piece]) -> list[int]:
        self.writes += 1
        return super().write(pieces)


class Small:
    """A tier on a simulated disk, with a clock and a calendar to turn."""

    def __init__(self, slots: int = 4, max_objects: int = 1000, room: int = 1 << 24) -> None:
        self.disk, self.clock, self.now_ms = CountedDisk(room, Random(1)), ManualClock(1), 1000
        self.slots, self.max_objects = slots, max_objects
        self.tier = self.open()

    def open(self) -> SsdTier:
        self.tier = SsdTier(
            self.disk,
            capacity_bytes=self.slots * SEGMENT,
            segment_bytes=SEGMENT,
            max_objects=self.max_objects,
            incarnation=1,
            lanes=0,
            clock=self.clock,
            wall_ms=lambda: self.now_ms,
        )
        return self.tier

    def put(self, *numbers: int, expires_ms: int = 0) -> list[bool]:
        return self.tier.put([record_of(n)._replace(expires_ms=expires_ms) for n in numbers], self.clock.now_ns() + SECOND)

    def read(self, number: int) -> bool:
        return reads(self.tier, number, self.clock.now_ns() + SECOND)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("full", "No space left"), ("read_only", "Read-only"), ("write_error", "Input/output"), ("sync_error", "Input/output")],
)
def test_failing_device_turns_the_tier_read_only_until_it_is_well(fault: str, reason: str) -> None:
    """Refused at once, with a reason; reads go on; one probe every two seconds; the first write that works ends it."""
    small = Small()
    assert small.put(1, 2) == [True, True]
    setattr(small.disk.faults, fault, 1.0 if "error" in fault else True)
    assert small.put(3) == [False]
    books = small.tier.books()
    assert books.state == "read-only"
    assert reason in books.reason
    assert small.read(1)
    calls = small.disk.writes
    assert small.put(3, 4) == [False, False]
    assert small.disk.writes == calls  # nobody waits for a device known to be broken
    small.clock.advance(3 * SECOND)
    assert small.put(3) == [False]
    assert small.disk.writes > calls
    setattr(small.disk.faults, fault, 0.0 if "error" in fault else False)
    assert small.put(3) == [False]
    small.clock.advance(3 * SECOND)
    assert small.put(3) == [True]
    assert (small.tier.books().state, small.tier.books().reason) == ("ok", "")
    small.disk.lose_power()
    small.open()
    assert [small.read(n) for n in (1, 2, 3)] == [True, True, True]


def test_removed_on_a_read_only_device_is_gone_and_its_tombstone_follows() -> None:
    """Removing must not fail because the disk does; what is not durable yet is counted."""
    small = Small()
    small.put(1, 2)
    small.disk.faults.read_only = True
    assert small.tier.remove([key_of(1)]) == 1
    assert not small.read(1)
    assert small.tier.books().counters["pending_removals"] == 1
    small.disk.faults.read_only = False
    small.clock.advance(3 * SECOND)
    assert small.put(3) == [True]
    assert small.tier.books().counters["pending_removals"] == 0
    small.open()
    assert [small.read(n) for n in (1, 2, 3)] == [False, True, True]


def test_device_that_answers_no_read_is_failed_until_one_succeeds() -> None:
    """Misses, not errors; the state tells why; and a read that works clears it."""
    small = Small()
    small.put(*range(4))
    small.disk.faults.read_error = 1.0
    assert not any(small.read(n % 4) for n in range(8))
    assert small.tier.books().state == "failed"
    assert small.put(9) == [False]
    assert small.tier.verify(key_of(1)) is None
    small.disk.faults.read_error = 0.0
    assert small.read(1)
    assert small.tier.books().state == "ok"
    assert small.tier.books().objects == 4


def test_disk_too_small_for_the_log_makes_it_reuse_its_segments() -> None:
    """Room promised and not there is no failure: fewer segments, counted."""
    small = Small(slots=8, room=3 * SEGMENT + 100_000)
    for number in range(0, 60, 3):
        assert small.put(number, number + 1, number + 2) == [True] * 3
    books = small.tier.books()
    assert books.state == "ok"
    assert books.counters["create_failed"] > 0
    assert books.counters["segments_reclaimed"] > 0
    assert small.read(59)


def test_read_only_at_opening_serves_what_is_there() -> None:
    """A file system remounted read-only is a smaller pool, not a node that can't start."""
    small = Small()
    small.put(1)
    small.disk.faults.read_only = True
    tier = small.open()
    assert tier.books().state == "read-only"
    assert small.read(1)
    assert small.put(2) == [False]
    assert tier.incarnation > tier.last_incarnation
    small.disk.faults.read_only = False
    small.clock.advance(3 * SECOND)
    assert small.put(2) == [True]


def test_expired_records_are_misses_and_stay_away_whatever_the_clock_does() -> None:
    """A ttl is wall clock: over is over in this life, also when the clock jumps back; a jump forward ends records early."""
    small = Small()
    small.put(1, 2, expires_ms=2000)
    small.put(3)
    small.now_ms = 1999
    assert small.read(1)
    small.now_ms = 2000
    assert not small.read(1)
    assert small.tier.books().counters["expired"] == 1
    small.now_ms = 1000
    assert not small.read(1)
    assert small.read(2)
    small.put(4)  # takes the tombstone of 1 along
    small.now_ms = 3000
    small.open()
    assert small.tier.recovery.expired == 2
    assert [small.read(n) for n in (1, 2, 3, 4)] == [False, False, True, True]
    small.now_ms = 1000
    small.open()
    assert not small.read(1)


def test_object_limit_drops_the_oldest_also_at_recovery() -> None:
    """Metadata stays bounded whatever was on the disk."""
    small = Small(max_objects=10)
    for number in range(30):
        assert small.put(number) == [True]
    assert small.tier.books().objects == 10
    assert [n for n in range(30) if small.read(n)] == list(range(20, 30))
    small.max_objects = 4
    small.open()
    assert [n for n in range(30) if small.read(n)] == list(range(26, 30))
    assert small.tier.recovery.surplus > 0


def test_smaller_capacity_at_opening_keeps_the_newest_segments() -> None:
    """A limit lowered between two lives holds at once."""
    small = Small(slots=8)
    for number in range(40):
        small.put(number)
    small.slots = 3
    tier = small.open()
    assert tier.books().used_bytes <= tier.books().capacity_bytes == 3 * SEGMENT
    assert small.read(39)
    for number in range(40, 80):
        assert small.put(number) == [True]


def test_records_used_since_written_survive_their_segment() -> None:
    """What readers come back for is copied on when its segment is given up; what nobody read leaves."""
    small = Small(slots=4)
    small.put(0, 1)
    for number in range(2, 100):
        small.put(number)
        assert small.read(0)
    counters = small.tier.books().counters
    assert not small.read(1)
    assert counters["reinserted"] > 0
    assert counters["evicted"] > 0
    small.open()
    assert small.read(0)


def test_segment_with_mostly_dead_records_is_compacted() -> None:
    """Its live records move on and its room comes back, though older segments are still full of live ones."""
    small = Small(slots=5)
    number = 0
    while len(small.tier._index.segments) < 4:
        small.put(number)
        number += 1
    segments = list(small.tier._index.segments.values())
    doomed = [held.entry.key for held, _ in small.tier._index.live(segments[1])]
    small.tier.remove(doomed[1:])
    first = next(held.entry.key for held, _ in small.tier._index.live(segments[0]))
    while not small.tier.books().counters["segments_compacted"]:
        small.put(number)
        number += 1
    assert small.tier.find([doomed[0], first]).count(None) == 0
    small.open()
    assert [entry is None for entry in small.tier.find([*doomed, first])] == [False] + [True] * (len(doomed) - 1) + [False]


def test_one_damaged_superblock_copy_is_not_missed_and_two_are_survived() -> None:
    """The incarnation never goes back, whatever page rots: segments know it too."""
    small = Small()
    small.put(1)
    before = small.tier.incarnation
    for page in (0, 4096):
        small.disk._files[NAME].now[page + 20] ^= 1
        tier = small.open()
        assert tier.last_incarnation >= before
        assert tier.incarnation > before
        before = tier.incarnation
        assert small.read(1)
    for page in (0, 4096):
        small.disk._files[NAME].now[page + 20] ^= 1
    assert small.open().last_incarnation > 0
    assert small.read(1)


def test_directory_in_use_or_of_another_segment_size_refused(tmp_path: Path) -> None:
    """Two nodes in one log would overwrite each other; a wrong setting must say what to do."""
    tier = SsdTier.open(tmp_path, capacity_bytes=4 * SEGMENT, segment_bytes=SEGMENT, incarnation=5)
    with pytest.raises(ConfigError, match="own directory"):
        SsdTier.open(tmp_path, capacity_bytes=4 * SEGMENT, segment_bytes=SEGMENT, incarnation=6)
    tier.close()
    with pytest.raises(ConfigError, match="empty the directory"):
        SsdTier.open(tmp_path, capacity_bytes=8 * SEGMENT, segment_bytes=2 * SEGMENT, incarnation=6)
    for wrong in ({"capacity_bytes": SEGMENT}, {"segment_bytes": 5000}, {"max_objects": 0}):
        with pytest.raises(ConfigError):
            SsdTier.open(tmp_path, **({"capacity_bytes": 4 * SEGMENT, "segment_bytes": SEGMENT, "incarnation": 6} | wrong))
    again = SsdTier.open(tmp_path, capacity_bytes=4 * SEGMENT, segment_bytes=SEGMENT, incarnation=3)
    assert (again.last_incarnation, again.incarnation) == (5, 6)
    again.close()


class FullDisk(FileDisk):
    """A directory whose writes fail when told to."""

    failing = False

    def write(self, pieces: Sequence[Piece]) -> list[int]:
        return [errno.ENOSPC] * len(pieces) if self.failing else super().write(pieces)


def test_failure_in_lanes_is_a_refusal_too(tmp_path: Path) -> None:
    """An errno from another thread arrives where the put waits."""
    disk, clock = FullDisk(tmp_path), ManualClock(1)
    tier = SsdTier(disk, capacity_bytes=8 * SEGMENT, segment_bytes=SEGMENT, incarnation=1, lanes=3, clock=clock)
    disk.failing = True
    assert tier.put([record_of(n) for n in range(4)], clock.now_ns() + SECOND) == [False] * 4
    assert tier.books().state == "read-only"
    disk.failing = False
    clock.advance(3 * SECOND)
    assert tier.put([record_of(n) for n in range(4)], clock.now_ns() + SECOND) == [True] * 4
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_real_file_system_full_and_remounted_read_only_and_back(tmp_path: Path) -> None:
    """The kernel's own errors, and descriptors opened while nothing could be written."""
    where = tmp_path / "mount"
    where.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(where)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        tier = SsdTier.open(where / "log", capacity_bytes=64 * SEGMENT, segment_bytes=SEGMENT, incarnation=1, lanes=2)
        for number in range(150):
            assert tier.put([record_of(number)], soon()) == [True]
        assert tier.books().counters["create_failed"] > 0
        tier.close()
        subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
        clock = ManualClock(1)
        tier = SsdTier(FileDisk(where / "log"), capacity_bytes=64 * SEGMENT, segment_bytes=SEGMENT, incarnation=1, lanes=2, clock=clock)
        assert reads(tier, 149, SECOND)
        assert tier.put([record_of(200)], SECOND) == [False]
        assert tier.books().state == "read-only"
        subprocess.run(["mount", "-o", "remount,rw", str(where)], check=True)
        clock.advance(3 * SECOND)
        assert tier.put([record_of(200)], clock.now_ns() + SECOND) == [True]
        assert tier.books().state == "ok"
        tier.close()
    finally:
        subprocess.run(["umount", str(where)], check=True)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_file_system_without_direct_transfers_is_used_and_said_so() -> None:
    """tmpfs may refuse O_DIRECT: the tier works all the same and says which way it goes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        tier = SsdTier.open(directory, capacity_bytes=4 * SEGMENT, segment_bytes=SEGMENT, incarnation=1, lanes=2)
        assert tier.put([record_of(1)], soon()) == [True]
        assert reads(tier, 1, soon())
        assert tier.books().counters["buffered_io"] == int(not tier.direct)
        tier.close()


def test_readers_scrubber_and_remover_beside_a_writer_never_see_wrong_bytes(tmp_path: Path) -> None:
    """Segments are given up, compacted and written anew while others read: bytes are right or it is a miss, and books stay sane."""
    tier = SsdTier.open(tmp_path, capacity_bytes=6 * SEGMENT, segment_bytes=SEGMENT, incarnation=1, lanes=4)
    stop, failures = threading.Event(), list[BaseException]()

    def run(seed: int) -> None:
        rng = Random(seed)
        try:
            while not stop.is_set():
                number = rng.randrange(60)
                if seed == 0:
                    assert tier.verify(key_of(number)) is not False
                elif seed == 1 and rng.random() < 0.2:
                    tier.remove([key_of(number)])
                else:
                    reads(tier, number, soon())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    rng = Random(9)
    for _ in range(150):
        tier.put([record_of(rng.randrange(60)) for _ in range(6)], soon())
        books = tier.books()
        assert books.used_bytes <= books.capacity_bytes
    stop.set()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert tier.books().counters["corrupt"] == 0
    assert tier.books().counters["segments_reclaimed"] + tier.books().counters["segments_compacted"] > 0
    tier.close()
