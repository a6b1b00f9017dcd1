"""The arena file: one owner, readers that check whose it is, and nothing left behind by the dead."""

import fcntl
import os
import stat
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ClosedError, ConfigError, FrameError, UnavailableError
from kvpool.testing.arena_owner import ArenaOwner
from kvpool.tier import Arena, ArenaMapping, reap_stale
from kvpool.units import MIB

NODE = uuid.uuid4().hex
SIZE = 2 * MIB + 123


def test_create_makes_a_private_locked_file_of_zeros(tmp_path: Path) -> None:
    """Only the owner's user may map it, and only one process may own it."""
    with Arena.create(tmp_path, NODE, 1, SIZE) as arena:
        status = arena.path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == 4096 + SIZE
        assert status.st_blocks * 512 >= SIZE  # the pages are there: no later write can find the file system full
        assert arena.data.size == arena.capacity == SIZE
        assert not arena.data.any()
        with arena.path.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_both_sides_see_each_others_bytes_at_the_same_offsets(tmp_path: Path) -> None:
    """Offset 0 is the first byte of data on both sides; writes of a client are the owner's."""
    with Arena.create(tmp_path, NODE, 1, SIZE) as arena, ArenaMapping.open(arena.path, NODE, 1) as mapping:
        arena.view(0, 3)[:] = (1, 2, 3)
        mapping.view(SIZE - 2, 2)[:] = (8, 9)
        assert mapping.view(0, 4).tolist() == [1, 2, 3, 0]
        assert arena.data[-2:].tolist() == [8, 9]
        assert mapping.superblock == arena.superblock


def test_mapping_in_another_process_sees_the_owners_bytes(tmp_path: Path) -> None:
    """The point of it all: another process, the same memory."""
    with ArenaOwner(SIZE, directory=tmp_path) as owner:
        second = owner.map()
        owner.mapping.view(17, 5)[:] = 42
        assert second.view(16, 7).tolist() == [0, 42, 42, 42, 42, 42, 0]
        second.close()


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (0, SIZE + 1), (SIZE, 1), (SIZE - 1, 2)])
def test_view_outside_refused(tmp_path: Path, offset: int, length: int) -> None:
    """A wrong offset must not wrap or clip to other bytes."""
    with Arena.create(tmp_path, NODE, 1, SIZE) as arena, pytest.raises(ConfigError, match="outside"):
        arena.view(offset, length)


def test_close_unlinks_but_views_and_mappings_stay_readable(tmp_path: Path) -> None:
    """An unlinked file is never truncated, so no reader gets a SIGBUS."""
    arena = Arena.create(tmp_path, NODE, 1, SIZE)
    mapping = ArenaMapping.open(arena.path, NODE, 1)
    arena.data[:] = 5
    view = arena.view(10, 4)
    arena.close()
    arena.close()
    assert list(tmp_path.iterdir()) == []
    assert view.tolist() == [5] * 4
    assert bool((mapping.data == 5).all())
    with pytest.raises(ClosedError):
        arena.view(0, 1)
    mapping.close()
    mapping.close()
    with pytest.raises(ClosedError):
        _ = mapping.data


def test_create_twice_for_one_living_node_refused(tmp_path: Path) -> None:
    """Two owners would write over each other."""
    with Arena.create(tmp_path, NODE, 1, SIZE), pytest.raises(ConfigError, match="runs twice"):
        Arena.create(tmp_path, NODE, 1, SIZE)
    assert list(tmp_path.iterdir()) == []


def test_create_sweeps_what_a_killed_owner_left_and_its_readers_read_on(tmp_path: Path) -> None:
    """kill -9 leaves a file; the next node takes the memory back without disturbing a mapping that is in use."""
    owner = ArenaOwner(SIZE, directory=tmp_path)
    owner.mapping.data[:] = 6
    owner.kill()
    left = Path(owner.shm.path)
    assert left.exists()
    with Arena.create(tmp_path, owner.node_id, owner.incarnation, SIZE) as arena:
        assert list(tmp_path.iterdir()) == [arena.path]
        assert not arena.data.any()
        assert bool((owner.mapping.data == 6).all())


def test_reap_leaves_the_living_and_foreign_files_alone(tmp_path: Path) -> None:
    """Only arenas whose lock can be had are anybody's to remove."""
    (tmp_path / "kvpool-notes.txt").write_text("mine")
    dead = tmp_path / f"kvpool-{NODE}-9.arena"
    dead.touch()
    with Arena.create(tmp_path, NODE, 1, SIZE) as arena:
        assert not dead.exists()
        dead.touch()
        assert reap_stale(tmp_path) == (dead,)
        assert arena.path.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["kvpool-notes.txt"]


def test_owner_that_exits_without_closing_leaves_no_file(tmp_path: Path) -> None:
    """A clean exit gives the memory back even when nobody called close."""
    code = f"from kvpool.tier import Arena; a = Arena.create({str(tmp_path)!r}, {NODE!r}, 1, 1 << 20); v = a.view(0, 9); print(a.path)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stderr == ""
    assert not Path(ran.stdout.strip()).exists()


def test_create_without_room_says_what_to_do(tmp_path: Path) -> None:
    """Asked before anything is taken; the message names the flag."""
    with pytest.raises(ConfigError, match="--capacity"):
        Arena.create(tmp_path, NODE, 1, 1 << 60)
    with pytest.raises(ConfigError, match="choose another"):
        Arena.create(tmp_path / "nowhere", NODE, 1, SIZE)
    assert list(tmp_path.iterdir()) == []


def test_open_of_anything_but_the_arena_asked_for_refused(tmp_path: Path) -> None:
    """A reader maps the arena of this node in this incarnation, or nothing."""
    with Arena.create(tmp_path, NODE, 5, SIZE) as arena:
        for node, incarnation in ((uuid.uuid4().hex, 5), (NODE, 4), (NODE, 6)):
            with pytest.raises(UnavailableError, match="another node or incarnation"):
                ArenaMapping.open(arena.path, node, incarnation)
        with pytest.raises(UnavailableError):
            ArenaMapping.open(tmp_path / "gone.arena", NODE, 5)
        link = tmp_path / "link"
        link.symlink_to(arena.path)
        with pytest.raises(UnavailableError):
            ArenaMapping.open(link, NODE, 5)
    with pytest.raises(UnavailableError, match="regular file"):
        ArenaMapping.open("/dev/null", NODE, 5)


def test_open_of_a_damaged_or_cut_file_refused(tmp_path: Path) -> None:
    """A file shorter than it says would be a SIGBUS later: refused now."""
    with Arena.create(tmp_path, NODE, 1, SIZE) as arena:
        path = tmp_path / "copy"
        path.write_bytes(arena.path.read_bytes())
        ArenaMapping.open(path, NODE, 1).close()
        os.truncate(path, 4096 + SIZE - 1)
        with pytest.raises(FrameError, match="superblock says"):
            ArenaMapping.open(path, NODE, 1)
        os.truncate(path, 100)
        with pytest.raises(FrameError, match="first page"):
            ArenaMapping.open(path, NODE, 1)
        path.write_bytes(bytes(8192))
        with pytest.raises(FrameError, match="magic"):
            ArenaMapping.open(path, NODE, 1)


def test_stray_write_of_a_client_never_reaches_the_superblock(tmp_path: Path) -> None:
    """The data region is mapped without it."""
    with Arena.create(tmp_path, NODE, 1, SIZE) as arena, ArenaMapping.open(arena.path, NODE, 1) as mapping:
        np.copyto(mapping.data, 255)
        ArenaMapping.open(arena.path, NODE, 1).close()
