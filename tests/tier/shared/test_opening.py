"""A shared tier on a path: one owner, whatever was there is replaced, readers see what was put."""

import os
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.tier_kit import assert_balanced, data_of, key_of, read, record_of, soon
from kvpool.tier.contract import Record, entry_of
from kvpool.tier.mappable import device_shape
from kvpool.tier.memory import MemoryTier
from kvpool.tier.pages import Bytes
from kvpool.tier.shared import FileSync, SharedRegion, SharedTierReader, open_shared_tier
from kvpool.tier.shared.opening import share
from kvpool.tier.shared.table import table_bytes
from kvpool.units import KIB, MIB

NODE = "0f" * 16
SIZE = 64 * KIB


def open_tier(path: Path, incarnation: int = 1, size: int = SIZE, max_objects: int = 32) -> MemoryTier:
    """A tier on `path`."""
    return open_shared_tier(path, size, NODE, incarnation, space=Allocator(size), policy=PrefixLru(), max_objects=max_objects)


def get(reader: SharedTierReader, number: int, length: int = 1000) -> Bytes | None:
    """The record's bytes as the reader sees them."""
    into = np.zeros(length, np.uint8)
    return into if reader.get([(key_of(number), into)], soon())[0] else None


def test_reader_finds_and_reads_what_the_owner_put_without_asking_it(tmp_path: Path) -> None:
    """All an owner knows of a record, and its bytes; and no more once it is removed."""
    tier, record = open_tier(tmp_path / "tier"), record_of(2, 777, expires_ms=1 << 50, parent=1, tenant="acme")
    tier.put([record, record_of(3)], soon())
    with SharedTierReader.open(tmp_path / "tier") as reader:
        assert (reader.shape.node_id.hex(), reader.shape.incarnation, reader.live) == (NODE, 1, True)
        assert reader.find([key_of(2), key_of(9)]) == [entry_of(record), None]
        assert reader.find([key_of(2)], now_ms=1 << 51) == [None]
        assert np.array_equal(get(reader, 2, 777), data_of(2, 777))  # type: ignore[arg-type]
        assert get(reader, 2, 776) is None
        assert reader.get([(key_of(3), np.zeros(1000, np.uint8))], 0) == [False]
        tier.remove([key_of(2)])
        assert get(reader, 2, 777) is None
        assert reader.counters == {"hits": 1, "hit_bytes": 777, "misses": 3, "again": 0, "damaged": 0}
    tier.close()


def test_expired_record_missed_by_readers(tmp_path: Path) -> None:
    """A ttl holds for those who don't ask the owner, too."""
    region, now = SharedRegion.own(tmp_path / "tier", table_bytes(8) + SIZE), [1]
    tier = share(region, SIZE, bytes(16), 1, space=Allocator(SIZE), policy=PrefixLru(), max_objects=8)
    tier._wall_ms = lambda: 1
    tier.put([record_of(1, expires_ms=1000)], soon())
    reader = SharedTierReader(region, wall_ms=lambda: now[0])
    assert get(reader, 1) is not None
    now[0] = 1000
    assert get(reader, 1) is None


def test_payload_that_rotted_is_a_miss_and_counted(tmp_path: Path) -> None:
    """A flipped bit is never served, whoever reads."""
    tier = open_tier(tmp_path / "tier")
    tier.put([record_of(1)], soon())
    with SharedTierReader.open(tmp_path / "tier") as reader, (tmp_path / "tier").open("r+b") as file:
        file.seek(reader.shape.data_offset + 500)
        file.write(bytes([data_of(1, 1000)[500] ^ 1]))
        file.flush()
        assert get(reader, 1) is None
        assert reader.counters["damaged"] == 1
    assert read(tier, [1]) == [False]


def test_second_owner_of_a_path_refused_while_the_first_lives(tmp_path: Path) -> None:
    """Two writers would write over each other."""
    tier = open_tier(tmp_path / "tier")
    with pytest.raises(ConfigError, match="alive"):
        open_tier(tmp_path / "tier", 2)
    tier.close()
    open_tier(tmp_path / "tier", 2).close()


def test_file_that_was_there_is_taken_over_and_stays(tmp_path: Path) -> None:
    """What it held is lost, it grows when it must, never shrinks, and only a file made by the tier goes with it."""
    path = tmp_path / "tier"
    path.write_bytes(b"x" * 100)
    tier = open_tier(path)
    size = path.stat().st_size
    assert size >= table_bytes(32) + SIZE
    tier.put([record_of(1)], soon())
    before = SharedTierReader.open(path)
    tier.close()
    tier = open_tier(path, 2, SIZE // 2, max_objects=8)
    assert path.stat().st_size == size
    assert list(tier.entries()) == []
    assert (before.live, get(before, 1)) == (False, None)
    after = SharedTierReader.open(path)
    assert after.shape.epoch > before.shape.epoch
    assert after.find([key_of(1)]) == [None]
    tier.close()
    assert path.exists()


def test_reader_of_a_retired_tier_waits_for_the_next_owner(tmp_path: Path) -> None:
    """Between two owners nothing can be read, and it says why."""
    path = tmp_path / "tier"
    path.touch()
    open_tier(path).close()
    with pytest.raises(UnavailableError, match="retired"):
        SharedTierReader.open(path)


def test_record_that_no_slot_can_hold_is_refused_and_costs_nothing(tmp_path: Path) -> None:
    """A name too long for the table is a refusal, not an error."""
    tier = open_tier(tmp_path / "tier")
    long = Record(key_of(1), None, 0, data_of(1, 10), tenant="ü" * 60)
    assert tier.put([long, long._replace(depth=1 << 64, tenant=""), long._replace(tenant="ü" * 59)], soon()) == [False, False, True]
    assert (tier.books().objects, tier.books().used_bytes, tier.books().state) == (1, 64, "ok")
    tier.close()


def test_memory_that_fails_to_flush_turns_the_tier_read_only(tmp_path: Path) -> None:
    """A record that others may not see is not acknowledged."""

    class Broken(FileSync):
        fails = False

        def flush(self, mapping: object, offset: int, length: int) -> None:
            if self.fails:
                raise OSError(5, "no flush")

    broken = Broken()
    tier = open_shared_tier(tmp_path / "tier", SIZE, NODE, 1, space=Allocator(SIZE), policy=PrefixLru(), max_objects=8, coherence=broken)
    assert tier.put([record_of(1)], soon()) == [True]
    broken.fails = True
    assert tier.put([record_of(2)], soon()) == [False]
    assert (tier.books().state, tier.books().reason) == ("read-only", "a write failed: [Errno 5] no flush")
    assert read(tier, [1, 2]) == [True, False]
    assert_balanced(tier)
    tier.close()


def test_tier_that_cannot_be_had_says_what_to_do_and_leaves_no_file(tmp_path: Path) -> None:
    """Found at start: no room, nonsense, something that can't be mapped."""
    for size, message in ((1 << 60, "lower --capacity"), (0, "at least 1")):
        with pytest.raises(ConfigError, match=message):
            open_shared_tier(tmp_path / "tier", size, NODE, 1, space=Allocator(SIZE), policy=PrefixLru())
    with pytest.raises(ConfigError, match="32 hexadecimal"):
        open_shared_tier(tmp_path / "tier", SIZE, "me", 1, space=Allocator(SIZE), policy=PrefixLru())
    with pytest.raises(ConfigError, match="64 bits"):
        open_tier(tmp_path / "tier", incarnation=-1)
    with pytest.raises(ConfigError, match="the region only"):
        open_shared_tier(tmp_path / "tier", SIZE, NODE, 1, space=Allocator(2 * SIZE), policy=PrefixLru())
    with pytest.raises(ConfigError, match="another path"):
        open_tier(tmp_path / "nowhere" / "tier")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="neither a file"):
        open_tier(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="memory device"):
        open_tier(Path("/dev/zero"))
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_device_shape_is_what_sysfs_says(tmp_path: Path) -> None:
    """A memory device's size isn't in its inode."""
    about = tmp_path / "dev" / "char" / "252:3"
    about.mkdir(parents=True)
    number = os.makedev(252, 3)
    with pytest.raises(ConfigError, match="doesn't tell"):
        device_shape(number, tmp_path)
    (about / "size").write_text("1073741824\n")
    assert device_shape(number, tmp_path) == (1 << 30, 2 * MIB)
    (about / "align").write_text("4096\n")
    assert device_shape(number, tmp_path) == (1 << 30, 4096)
