"""How much memory an arena may take: asked before it is taken, because afterwards the kernel answers with a kill.

A file on tmpfs is memory. Three limits hold at once: what the file system has left, what the machine has left, and what the
container's memory limit has left. Taking more than the first is a clean ENOSPC; more than the others wakes the OOM killer.
"""

import os
from pathlib import Path

from kvpool.errors import ConfigError
from kvpool.units import KIB, format_size

_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


def require_space(directory: Path, wanted: int) -> None:
    """Raise `ConfigError` saying what to do, unless `directory` can take a file of `wanted` bytes now."""
    try:
        stat = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"arena directory {directory}: {error.strerror}; create it or choose another one") from error
    free = stat.f_bavail * stat.f_frsize
    if wanted > free:
        raise ConfigError(
            f"{directory} has {format_size(free)} free, the arena wants {format_size(wanted)}: lower --capacity or enlarge the file system "
            f"(a container's /dev/shm: docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory mounted there)"
        )
    memory = available_memory() if file_system(directory) in _MEMORY_FILE_SYSTEMS else None
    if memory is not None and wanted > memory:
        raise ConfigError(
            f"{format_size(memory)} of memory is available, the arena wants {format_size(wanted)} in {directory}: "
            f"lower --capacity or raise the memory limit"
        )


def available_memory() -> int | None:
    """Bytes this process may still use without anyone being killed: the machine's or the container's, whichever is less."""
    found = [value for value in (_machine_available(), _container_available()) if value is not None]
    return min(found) if found else None


def file_system(directory: Path) -> str:
    """Type of the file system that holds `directory` (`tmpfs`, `ext4`...), or `unknown`."""
    real = os.path.realpath(directory)
    best, kind = "", "unknown"
    for line in _lines(Path("/proc/self/mounts")):
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def _machine_available() -> int | None:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * KIB
    return None


def _container_available() -> int | None:
    """What the memory cgroup (version 2) this process sees as its root leaves; None where there is no limit."""
    limit, used = (_lines(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if not limit or not used or not limit[0].isdigit():
        return None
    return max(0, int(limit[0]) - int(used[0]))


def _lines(path: Path) -> list[str]:
    """The file's lines; empty where this kernel or container doesn't show it."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
