"""A directory as a disk: errors are values, descriptors are bounded, one owner."""

import errno
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.tier.ssd import PAGE, FileDisk, Piece
from kvpool.tier.ssd.handles import MAX_OPEN
from kvpool.tier.ssd.lanes import aligned


def test_pieces_written_are_read_back_in_one_or_many_calls(tmp_path: Path) -> None:
    """Neighbours go out as one call; that must not show."""
    disk = FileDisk(tmp_path)
    disk.create("a", 8 * PAGE)
    data = aligned(4 * PAGE)
    data[:] = np.random.default_rng(1).integers(0, 256, data.size, dtype=np.uint8)
    pieces = [Piece("a", at * PAGE, data[n * PAGE : (n + 1) * PAGE]) for n, at in enumerate((1, 2, 5, 3))]
    assert disk.write(pieces) == [0] * 4
    assert disk.sync("a") == 0
    back = aligned(4 * PAGE)
    assert disk.read([Piece("a", at * PAGE, back[n * PAGE : (n + 1) * PAGE]) for n, at in enumerate((1, 2, 5, 3))]) == [0] * 4
    assert np.array_equal(back, data)
    disk.close()


def test_absent_files_and_ends_of_files_are_errnos(tmp_path: Path) -> None:
    """A transfer never raises, and one bad piece spoils no other."""
    disk, page = FileDisk(tmp_path), aligned(PAGE)
    disk.create("a", PAGE)
    assert disk.read([Piece("b", 0, page), Piece("a", PAGE, page), Piece("a", 0, page)]) == [errno.ENOENT, errno.ENODATA, 0]
    assert disk.write([Piece("b", 0, page)]) == [errno.ENOENT]
    assert disk.sync("b") == errno.ENOENT
    with pytest.raises(FileExistsError):
        disk.create("a", PAGE)
    disk.close()
    disk.close()
    assert disk.read([Piece("a", 0, page)]) == [errno.EBADF]


def test_many_files_use_a_bounded_number_of_descriptors(tmp_path: Path) -> None:
    """A log of ten thousand segments must not use up the process's descriptors."""
    disk, page = FileDisk(tmp_path), aligned(PAGE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(MAX_OPEN + 40):
        disk.create(f"f{number}", PAGE)
        assert disk.write([Piece(f"f{number}", 0, page)]) == [0]
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= MAX_OPEN
    assert len(disk.names()) == MAX_OPEN + 40
    disk.rename("f1", "f2")
    disk.remove("f2")
    assert disk.read([Piece("f1", 0, page), Piece("f2", 0, page)]) == [errno.ENOENT] * 2
    disk.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_place_that_is_no_directory_refused_with_advice(tmp_path: Path) -> None:
    """The message must say what to do."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose a directory"):
        FileDisk(tmp_path / "file" / "log")
