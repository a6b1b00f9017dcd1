"""How much memory there is, read from this machine."""

from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.tier import space
from kvpool.units import GIB


def test_file_system_of_known_places_is_named() -> None:
    """tmpfs is memory, and only its name says so."""
    assert space.file_system(Path("/proc")) == "proc"
    assert space.file_system(Path("/dev/shm")) == "tmpfs"
    assert space.file_system(Path("/no/such/place")) == space.file_system(Path("/"))


def test_available_memory_is_between_nothing_and_the_whole() -> None:
    """A plausible number on any Linux."""
    available = space.available_memory()
    assert available is not None
    assert 0 < available < 1 << 50


def test_more_than_the_memory_refused_on_tmpfs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """tmpfs can be larger than what is left of the memory; taking it would wake the OOM killer. A disk has no such limit."""
    monkeypatch.setattr(space, "available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="memory limit"):
        space.require_space(Path("/dev/shm"), 1001)
    space.require_space(Path("/dev/shm"), 1000)
    monkeypatch.setattr(space, "file_system", lambda directory: "ext4")
    space.require_space(Path("/dev/shm"), 1001)


def test_container_limit_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pod the cgroup's limit is the memory there is; `max` means none."""
    files = {"memory.max": [str(3 * GIB)], "memory.current": [str(2 * GIB)], "meminfo": ["MemAvailable: 999999999 kB"]}
    monkeypatch.setattr(space, "_lines", lambda path: files[path.name])
    assert space.available_memory() == GIB
    files["memory.max"] = ["max"]
    assert space.available_memory() == 999999999 * 1024
