"""Anything that can be mapped: a file, a file on tmpfs, a device of memory (`/dev/dax*`), taken by one owner or looked at by readers.

Theory. What an owner maps stays mapped by readers after the owner has gone, so nothing here ever makes a file shorter: a page that is cut
off is a SIGBUS for whoever touches it. A file the owner made is unlinked at its end; its readers keep the bytes. One that was there before
stays, as a device does.

An owner holds an exclusive `flock` for as long as it lives. It is seen by processes of this host only: that two hosts don't both own one
device is for whoever gives out devices.

A device of memory is mapped in units of its alignment, 2 MiB unless it says otherwise, and its size is told by sysfs, not by `stat`.
"""

import errno
import fcntl
import logging
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.errors import ConfigError, UnavailableError
from kvpool.tier.pages import Bytes, ask_for_huge_pages, populate
from kvpool.tier.space import file_system, require_space
from kvpool.units import KIB, MIB, format_size

log = logging.getLogger(__name__)

DEVICE_ALIGNMENT: Final = 2 * MIB
"""Unit of a memory device's mappings where it doesn't say itself."""

_MEMORY: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

SYSFS: Final = Path("/sys")
_PAGE: Final = 4 * KIB
_TRIES: Final = 8
_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A mapping of the first `memory.size` bytes. `descriptor` is open (it holds the lock) for an owner, -1 for a reader."""

    path: Path
    memory: Bytes
    mapping: mmap.mmap
    is_device: bool
    is_new: bool
    descriptor: int


def map_owned(path: Path, nbytes: int) -> Mapped:
    """Take `path` for the one who writes it and map `nbytes` or a little more; what was in it is still there.

    A file that isn't there is made, with mode 0600; one that is too short grows. Where pages are memory they are faulted in now, huge
    ones if there are any. Raises `ConfigError` saying what to do: owned by another process, too small a device, no room, neither a
    file nor a device.
    """
    descriptor, is_new = _open_locked(path)
    try:
        on_device = is_device_file(os.fstat(descriptor))
        length = _device_length(descriptor, path, nbytes) if on_device else _grow(descriptor, path, nbytes)
        mapping = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        memory = np.frombuffer(mapping, np.uint8)
        if on_device or is_in_memory(path):
            ask_for_huge_pages(memory)
            populate(memory)
    except (OSError, ConfigError) as error:
        if is_new:
            path.unlink(missing_ok=True)
        os.close(descriptor)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"can't map {format_size(nbytes)} of {path}: {error.strerror}") from error
    return Mapped(path=path, memory=memory, mapping=mapping, is_device=on_device, is_new=is_new, descriptor=descriptor)


def map_to_read(path: Path) -> Mapped:
    """Map all of `path` for reading only. Raises `UnavailableError` when it isn't there, is empty, or can't be mapped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except OSError as error:
        raise UnavailableError(f"{path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        on_device = is_device_file(status)
        if not on_device and not stat.S_ISREG(status.st_mode):
            raise UnavailableError(f"{path} is neither a file nor a memory device")
        length = device_shape(status.st_rdev, SYSFS)[0] if on_device else status.st_size
        if length < 1:
            raise UnavailableError(f"{path} has no bytes to map")
        mapping = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ConfigError) as error:
        raise UnavailableError(f"{path}: {error}") from error
    finally:
        os.close(descriptor)
    memory = np.frombuffer(mapping, np.uint8)
    return Mapped(path=path, memory=memory, mapping=mapping, is_device=on_device, is_new=False, descriptor=-1)


def is_in_memory(path: Path) -> bool:
    """Whether a file at `path` is memory, as on tmpfs, not storage."""
    return file_system(path.parent) in _MEMORY


def is_device(path: Path) -> bool:
    """Whether `path` is a character device. False where nothing is there yet."""
    try:
        return is_device_file(path.lstat())
    except OSError:
        return False


def unit_of(path: Path) -> int:
    """What offsets and lengths of the device's mappings are multiples of, bytes. Raises `ConfigError` when it is no memory device."""
    return device_shape(path.lstat().st_rdev, SYSFS)[1]


def is_device_file(status: os.stat_result) -> bool:
    """Whether this is a character device's status."""
    return stat.S_ISCHR(status.st_mode)


def give_back(mapped: Mapped) -> None:
    """An owner's end: unlink what it made, drop the lock. The memory lives until the last view of it is gone."""
    if mapped.is_new:
        mapped.path.unlink(missing_ok=True)
    fcntl.flock(mapped.descriptor, fcntl.LOCK_UN)  # the mapping keeps a duplicate of the descriptor open
    os.close(mapped.descriptor)


def device_shape(number: int, sysfs: Path) -> tuple[int, int]:
    """Bytes and alignment of the memory device with this `st_rdev`. Raises `ConfigError` when sysfs doesn't tell its size."""
    about = sysfs / "dev" / "char" / f"{os.major(number)}:{os.minor(number)}"
    try:
        size = int((about / "size").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{about / 'size'} doesn't tell the device's size: is it a memory device such as /dev/dax0.0?") from error
    try:
        return size, int((about / "align").read_text())
    except (OSError, ValueError):
        return size, DEVICE_ALIGNMENT


def _open_locked(path: Path) -> tuple[int, bool]:
    """A descriptor with the lock, and whether the file was made. An owner that ends just now may unlink it meanwhile: then again."""
    for _ in range(_TRIES):
        try:
            descriptor, is_new = _open(path)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"can't open {path}: {error.strerror}; give another path") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISCHR(status.st_mode):
            os.close(descriptor)
            raise ConfigError(f"{path} is neither a file nor a memory device; give another path")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise ConfigError(f"{path} belongs to a process that is alive; give each node a path of its own") from error
        except OSError as error:
            log.warning("%s can't be locked (%s): nothing stops a second owner", path, error.strerror)
        if os.fstat(descriptor).st_nlink:
            return descriptor, is_new
        os.close(descriptor)
    raise ConfigError(f"{path} came and went {_TRIES} times while being opened; something else removes it")


def _open(path: Path) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | _FLAGS), False
    except FileNotFoundError:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600), True


def _device_length(descriptor: int, path: Path, nbytes: int) -> int:
    size, alignment = device_shape(os.fstat(descriptor).st_rdev, SYSFS)
    length = -(-nbytes // alignment) * alignment
    if length > size:
        raise ConfigError(f"{path} has {format_size(size)}, {format_size(length)} are wanted: lower the capacity")
    return length


def _grow(descriptor: int, path: Path, nbytes: int) -> int:
    """Make the file at least `nbytes` long, every page there; it never gets shorter."""
    length = -(-nbytes // _PAGE) * _PAGE
    status = os.fstat(descriptor)
    require_space(path.absolute().parent, max(0, length - status.st_blocks * 512))
    if status.st_size < length:
        os.ftruncate(descriptor, length)
    try:
        os.posix_fallocate(descriptor, 0, length)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(f"{path.parent} has no room for {format_size(length)}: lower the capacity") from error
    return length
