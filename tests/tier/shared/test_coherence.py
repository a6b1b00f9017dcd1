"""The ways to make memory visible to others: chosen by what it is, and changing none of its bytes."""

import ctypes
import mmap
import os
import uuid
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ConfigError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.tier_kit import data_of, key_of, read, record_of, soon
from kvpool.tier.shared import CacheLines, Coherence, Coherent, FileSync, SharedRegion, SharedTierReader, coherence, open_shared_tier
from kvpool.units import KIB

SIZE = 64 * KIB


def cache_lines() -> Coherence:
    """Where libpmem is."""
    try:
        ctypes.CDLL("libpmem.so.1")
    except OSError:
        pytest.skip("libpmem1 is not installed")
    return CacheLines()


@pytest.mark.parametrize("make", [Coherent, FileSync, cache_lines], ids=["coherent", "msync", "cache-lines"])
def test_tier_over_each_coherence_is_read_by_a_reader_with_the_same(tmp_path: Path, make: type[Coherent]) -> None:
    """Both sides flush at every point of the protocol: nothing is lost by it, and nothing of the mapping's other bytes."""
    path, kind = tmp_path / "tier", make()
    tier = open_shared_tier(path, SIZE, uuid.uuid4().hex, 1, space=Allocator(SIZE), policy=PrefixLru(), max_objects=8, coherence=kind)
    lengths = [1, 63, 65, 4097, 10_001]
    assert tier.put([record_of(number, length) for number, length in enumerate(lengths)], soon()) == [True] * 5
    reader = SharedTierReader.open(path, coherence=kind)
    for number, length in enumerate(lengths):
        into = np.zeros(length, np.uint8)
        assert reader.get([(key_of(number), into)], soon()) == [True]
        assert np.array_equal(into, data_of(number, length))
        assert read(tier, [number], length) == [True]
    tier.remove([key_of(2)])
    assert reader.get([(key_of(2), np.zeros(65, np.uint8))], soon()) == [False]
    reader.close()
    tier.close()


def test_cache_lines_flush_keeps_what_was_written_and_works_on_read_only_mappings(tmp_path: Path) -> None:
    """A reader has no right to write, and must be able to drop lines all the same; ranges need not begin at a line."""
    kind, path = cache_lines(), tmp_path / "bytes"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        writer, viewer = mmap.mmap(file.fileno(), 8192), mmap.mmap(file.fileno(), 8192, prot=mmap.PROT_READ)
    writer[100:300] = b"x" * 200
    kind.flush(writer, 101, 7)
    kind.flush(writer, 8191, 1)
    kind.flush(writer, 0, 0)
    kind.invalidate(viewer, 99, 203)
    assert viewer[99:301] == b"\0" + b"x" * 200 + b"\0"


def test_cache_lines_without_the_library_say_what_to_install_and_leave_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not flushing where flushing was asked for would serve old bytes: an error, not a fallback."""
    monkeypatch.setattr(coherence, "_LIBPMEM", "libnowhere.so.9")
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv("PMEM_NO_CLWB", raising=False)
        else:
            monkeypatch.setenv("PMEM_NO_CLWB", before)
        with pytest.raises(ConfigError, match="libpmem1"):
            CacheLines()
        assert os.environ.get("PMEM_NO_CLWB") == before


def test_coherence_nobody_chose_fits_the_memory(tmp_path: Path) -> None:
    """A file on storage is synced, memory of one host needs nothing, and what only hosts without coherence need is never assumed."""
    region = SharedRegion.own(tmp_path / "on-disk", SIZE)
    assert region.coherence.name in ("msync", "coherent")  # coherent where the tests' directory is on tmpfs
    region.close()
    if Path("/dev/shm").is_dir():
        region = SharedRegion.own(Path("/dev/shm") / f"kvpool-test-{uuid.uuid4().hex}", SIZE)
        assert region.coherence.name == "coherent"
        region.close()
