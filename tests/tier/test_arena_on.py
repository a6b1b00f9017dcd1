"""An arena at a path of the caller's choice, what it got of huge pages and locking, and the same on a memory device."""

import logging
import mmap
import os
import resource
import uuid
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ConfigError, FrameError, UnavailableError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.tier_kit import read, record_of, soon
from kvpool.tier import Arena, ArenaMapping, arena, mappable, pages
from kvpool.tier.pages import ask_for_huge_pages, huge_bytes, huge_in, make_huge, map_shared, populate
from kvpool.tier.shared import SharedTierReader, open_shared_tier
from kvpool.units import KIB, MIB

NODE = uuid.uuid4().hex
SIZE = 2 * MIB + 123

SMAPS = """\
10000-20000 rw-s 00001000 00:1a 1 /dev/shm/kvpool-x.arena
Size:                 64 kB
KernelPageSize:        4 kB
ShmemPmdMapped:       16 kB
FilePmdMapped:         8 kB
VmFlags: rd wr sh mr
20000-30000 rw-s 00000000 00:1a 2 /dev/dax0.0
Size:                 64 kB
KernelPageSize:     2048 kB
AnonHugePages:         0 kB
30000-40000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
AnonHugePages:      9999 kB
"""


def test_file_of_a_dead_owner_is_replaced_and_its_readers_read_on(tmp_path: Path) -> None:
    """A new file at the old name: nobody who still maps the old one sees it change."""
    path = tmp_path / "pool"
    with Arena.on(path, NODE, 1, SIZE) as first:
        first.data[:] = 9
        old = ArenaMapping.open(path, NODE, 1)
        os.link(path, tmp_path / "kept")
    assert not path.exists()
    (tmp_path / "kept").rename(path)  # as a killed owner leaves it
    with Arena.on(path, NODE, 2, SIZE) as second:
        assert not second.data.any()
        assert bool((old.data == 9).all())
        with pytest.raises(UnavailableError, match="another node or incarnation"):
            ArenaMapping.open(path, NODE, 1)
        ArenaMapping.open(path, NODE, 2).close()
    assert list(tmp_path.iterdir()) == []


def test_path_of_a_living_owner_or_of_no_file_refused(tmp_path: Path) -> None:
    """Nothing of anybody else's is taken."""
    with Arena.on(tmp_path / "pool", NODE, 1, SIZE), pytest.raises(ConfigError, match="alive"):
        Arena.on(tmp_path / "pool", NODE, 2, SIZE)
    for path, message in ((tmp_path, "neither a file"), (tmp_path / "no" / "pool", "create it"), (Path("/dev/null"), "memory device")):
        with pytest.raises(ConfigError, match=message):
            Arena.on(path, NODE, 1, SIZE)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="another path"):
        Arena.on(tmp_path / "link", NODE, 1, SIZE)


def test_arena_tells_what_it_got_of_locking(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Locked when the limit allows it, and never pretended."""
    with Arena.create(tmp_path, NODE, 1, 64 * KIB) as plain:
        assert plain.locked_bytes == 0
    before = locked_now()
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    with caplog.at_level(logging.INFO), Arena.create(tmp_path, NODE, 1, 64 * KIB, lock=True) as asked:
        if limit == resource.RLIM_INFINITY or limit >= MIB:
            assert asked.locked_bytes == 64 * KIB
        assert asked.locked_bytes == locked_now() - before
    assert len([record for record in caplog.records if record.name == "kvpool.tier.arena" and record.levelno == logging.INFO]) == 1


def test_arena_that_may_not_be_locked_works_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, refused by the limit: visible, with what to do."""
    monkeypatch.setattr(arena, "lock_pages", lambda view: 12)
    with Arena.create(tmp_path, NODE, 1, SIZE, lock=True) as got:
        assert got.locked_bytes == 0
        got.data[:] = 1
    assert "RLIMIT_MEMLOCK" in caplog.text


def locked_now() -> int:
    """Bytes this process has locked."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmLck"))
    return int(line.split()[1]) * KIB


def test_huge_bytes_are_those_of_the_mapping_and_no_other() -> None:
    """A neighbour's huge pages are not ours; a device's mapping has no others."""
    lines = SMAPS.splitlines()
    assert huge_in(lines, 0x10000, 0x10000) == 24 * KIB
    assert huge_in(lines, 0x20000, 0x10000) == 64 * KIB
    assert huge_in(lines, 0x28000, 0x1000) == 4 * KIB
    assert huge_in(lines, 0x30000, 0x10000) == 64 * KIB
    assert huge_in(lines, 0x50000, 0x10000) == 0
    assert huge_in(lines, 0x10000, 0x20000) == 88 * KIB


def test_huge_bytes_of_real_memory_agree_with_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the kernel, not assumed; where it doesn't tell, none."""
    mapping = mmap.mmap(-1, 8 * MIB, mmap.MAP_PRIVATE)
    view = np.frombuffer(mapping, np.uint8)
    ask_for_huge_pages(view)
    populate(view)
    assert 0 <= huge_bytes(view) <= 8 * MIB
    assert huge_bytes(view) % (64 * KIB) == 0
    with Arena.create(tmp_path, NODE, 1, SIZE) as got:
        assert 0 <= got.huge_bytes <= SIZE
    monkeypatch.setattr(pages, "SMAPS", tmp_path / "nothing")
    assert huge_bytes(view) == 0


def test_shared_mapping_lies_where_huge_pages_of_its_file_can_be_seen(tmp_path: Path) -> None:
    """Address and offset agree modulo 2 MiB, the bytes are the file's, and with the last view the whole place is free again."""
    path, offset, length = tmp_path / "file", 3 * 4096, 5 * MIB
    path.write_bytes(bytes(offset + length))
    descriptor = os.open(path, os.O_RDWR)
    try:
        view = map_shared(descriptor, length, offset)
        assert (view.ctypes.data - offset) % (2 * MIB) == 0
        view[0], view[-1] = 7, 9
        assert os.pread(descriptor, 1, offset) == b"\7"
        assert os.pread(descriptor, 1, offset + length - 1) == b"\11"
        assert str(path) in Path("/proc/self/maps").read_text()
        del view
        assert str(path) not in Path("/proc/self/maps").read_text()
        with pytest.raises(OSError, match="Invalid argument"):
            map_shared(descriptor, length, offset + 1)
    finally:
        os.close(descriptor)


def test_making_huge_pages_keeps_what_is_in_the_small_ones() -> None:
    """The kernel copies; it may also refuse, and then nothing changes either."""
    descriptor = os.memfd_create("pages")
    try:
        os.ftruncate(descriptor, 8 * MIB)
        view = map_shared(descriptor, 8 * MIB, 0)
        view[:] = np.arange(8 * MIB, dtype=np.uint32).view(np.uint8)[: 8 * MIB]
        before = view.tobytes()
        make_huge(view)
        assert view.tobytes() == before
        assert huge_bytes(view) in (0, 8 * MIB)
    finally:
        os.close(descriptor)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of 8 MiB that says it is a memory device."""
    about = tmp_path / "sys" / "dev" / "char" / "0:0"
    about.mkdir(parents=True)
    (about / "size").write_text(f"{8 * MIB}\n")
    (about / "align").write_text(f"{2 * MIB}\n")
    path = tmp_path / "dax0.0"
    path.write_bytes(b"\xff" * 8 * MIB)
    monkeypatch.setattr(mappable, "SYSFS", tmp_path / "sys")
    monkeypatch.setattr(mappable, "is_device_file", lambda status: status.st_size == 8 * MIB)
    return path


def test_arena_on_a_device_keeps_to_its_units_and_leaves_it_there(device: Path) -> None:
    """Mapped by whole units behind a unit for the superblock; at the end it is no arena any more."""
    with Arena.on(device, NODE, 1, SIZE) as owner:
        assert (owner.superblock.data_offset, owner.data.size) == (2 * MIB, SIZE)
        owner.view(5, 3)[:] = (1, 2, 3)
        with ArenaMapping.open(device, NODE, 1) as mapping:
            assert mapping.view(5, 3).tolist() == [1, 2, 3]
        with pytest.raises(ConfigError, match="alive"):
            Arena.on(device, NODE, 2, SIZE)
    with pytest.raises(FrameError, match="magic"):
        ArenaMapping.open(device, NODE, 1)
    with pytest.raises(ConfigError, match="lower the capacity"):
        Arena.on(device, NODE, 1, 6 * MIB + 1)
    Arena.on(device, NODE, 2, 6 * MIB).close()
    assert device.stat().st_size == 8 * MIB


def test_shared_tier_on_a_device_is_read_by_others_and_leaves_it_there(device: Path) -> None:
    """The same tier on memory that is no file."""
    tier = open_shared_tier(device, 3 * MIB, NODE, 1, space=Allocator(3 * MIB), policy=PrefixLru(), max_objects=16)
    assert tier.put([record_of(1)], soon()) == [True]
    with SharedTierReader.open(device) as reader:
        assert read(tier, [1]) == [True]
        assert reader.get([(record_of(1).key, np.zeros(1000, np.uint8))], soon()) == [True]
    tier.close()
    assert device.exists()
    with pytest.raises(ConfigError, match="lower the capacity"):
        open_shared_tier(device, 8 * MIB, NODE, 1, space=Allocator(MIB), policy=PrefixLru())
