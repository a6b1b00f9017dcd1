"""The simulated disk: what survives, and what it does wrong on demand."""

import errno
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from kvpool.testing.sim.disk import Crash, SimDisk
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Disk, Piece

FILE = "log.0"


def page(value: int, pages: int = 1) -> Bytes:
    return np.full(PAGE * pages, value, np.uint8)


def disk(seed: int = 1, pages: int = 8) -> SimDisk:
    made = SimDisk(1 << 20, Random(seed))
    made.create(FILE, pages * PAGE)
    made.sync_directory()
    return made


def read(one: Disk, at: int, pages: int = 1) -> Bytes:
    data = page(255, pages)
    assert one.read([Piece(FILE, at * PAGE, data)]) == [0]
    return data


def test_disk_is_a_disk_and_reads_what_was_written() -> None:
    """Without faults it is a plain store of bytes."""
    one = disk()
    assert isinstance(one, SimDisk)
    assert one.write([Piece(FILE, 0, page(1)), Piece(FILE, 2 * PAGE, page(2, 2))]) == [0, 0]
    assert [int(read(one, at)[0]) for at in range(5)] == [1, 0, 2, 2, 0]
    assert (one.names(), one.size(FILE)) == ([FILE], 8 * PAGE)
    assert one.read([Piece(FILE, 8 * PAGE, page(0))]) == [errno.ENODATA]
    assert one.read([Piece("nowhere", 0, page(0))]) == [errno.ENOENT]


def test_disk_power_loss_keeps_synced_and_tears_or_loses_the_rest() -> None:
    """A sync is the only promise: over many seeds an unsynced page is seen kept, lost and torn."""
    fates = set[str]()
    for seed in range(40):
        one = disk(seed)
        one.write([Piece(FILE, 0, page(1))])
        assert one.sync(FILE) == 0
        one.write([Piece(FILE, PAGE, page(2))])
        one.lose_power()
        assert set(read(one, 0)) == {1}
        left = set(read(one, 1).tolist())
        fates.add({frozenset({2}): "kept", frozenset({0}): "lost"}.get(frozenset(left), "torn"))
    assert fates == {"kept", "lost", "torn"}


def test_disk_process_kill_keeps_all_writes_but_makes_none_safe() -> None:
    """What the kernel has taken outlives the process, not the power; a sync after the restart makes it safe."""
    lost = 0
    for seed in range(20):
        for synced in (False, True):
            one = disk(seed)
            one.write([Piece(FILE, 0, page(1))])
            one.kill()
            assert set(read(one, 0)) == {1}
            if synced:
                assert one.sync(FILE) == 0
            one.lose_power()
            lost += set(read(one, 0)) != {1}
            assert not synced or set(read(one, 0)) == {1}
    assert lost


def test_disk_names_survive_power_loss_only_once_synced() -> None:
    """A file may vanish, or come back, until its directory is synced; newer changes go first."""
    seen = set[tuple[str, ...]]()
    for seed in range(40):
        one = disk(seed)
        one.create("log.1", PAGE)
        one.rename("log.1", "log.2")
        one.remove(FILE)
        one.lose_power()
        seen.add(tuple(one.names()))
    assert seen == {(FILE,), (FILE, "log.1"), (FILE, "log.2"), ("log.2",)}


def test_disk_failed_sync_drops_pages_that_reads_still_show() -> None:
    """As Linux does: after a failed fsync the next one succeeds, and the data is not there."""
    one = disk()
    one.write([Piece(FILE, 0, page(1))])
    one.faults.sync_error = 1.0
    assert one.sync(FILE) == errno.EIO
    one.faults.sync_error = 0.0
    assert set(read(one, 0)) == {1}
    assert one.sync(FILE) == 0
    one.lose_power()
    assert set(read(one, 0)) == {0}


@pytest.mark.parametrize(
    ("arm", "expected"),
    [
        (lambda faults: setattr(faults, "full", True), errno.ENOSPC),
        (lambda faults: setattr(faults, "read_only", True), errno.EROFS),
        (lambda faults: setattr(faults, "write_error", 1.0), errno.EIO),
        (lambda faults: setattr(faults, "short_write", 1.0), errno.EIO),
    ],
)
def test_disk_write_fault_is_an_errno(arm: Callable[[object], None], expected: int) -> None:
    """A failing transfer is a value to the log."""
    one = disk()
    arm(one.faults)
    assert one.write([Piece(FILE, 0, page(1, 4))]) == [expected]


def test_disk_misdirected_write_says_success_and_is_remembered() -> None:
    """The worst fault: the answer is 0 and the bytes are elsewhere; what was synced may be gone, so the judge must know."""
    one = disk(3)
    one.faults.misdirected = 1.0
    assert one.write([Piece(FILE, 0, page(1))]) == [0]
    assert one.lied
    assert [int(read(one, at)[0]) for at in range(8)].count(1) == 1


def test_disk_full_refuses_new_files() -> None:
    """Capacity is a bound."""
    one = disk()
    with pytest.raises(OSError, match="no space left"):
        one.create("log.1", 1 << 20)
    one.faults.read_only = True
    with pytest.raises(OSError, match="read-only"):
        one.remove(FILE)


def test_disk_crash_in_a_write_leaves_some_of_it() -> None:
    """The process may die in the middle of a batch: any subset of its pieces is there, one perhaps in part."""
    written = set[int]()
    for seed in range(30):
        one = disk(seed)
        one.faults.crash_in = 2
        assert one.read([Piece(FILE, 0, page(0))]) == [0]
        assert one.sync(FILE) == 0
        with pytest.raises(Crash):
            one.write([Piece(FILE, at * PAGE, page(1)) for at in range(4)])
        written.add(sum(int(read(one, at)[0]) for at in range(4)))
    assert {0, 4} <= written
    assert len(written) > 2


def test_disk_flipped_bit_is_one_bit() -> None:
    """Rot changes one bit, now and after a power loss."""
    one = disk()
    assert one.flip_bit()
    one.lose_power()
    assert sum(int(byte).bit_count() for byte in read(one, 0, 8)) == 1
    assert one.lied
