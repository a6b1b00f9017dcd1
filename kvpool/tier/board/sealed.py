"""Anonymous memory that is passed from process to process and can't be truncated under anybody who maps it (no SIGBUS)."""

import fcntl
import mmap
import os
import stat
from typing import Final

from kvpool.errors import ConfigError

_FUTURE_WRITE: Final = 0x0010  # F_SEAL_FUTURE_WRITE, Linux 5.1; Python's fcntl module has no name for it
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def make_memory(name: str, nbytes: int, *, only_writer: bool) -> tuple[int, mmap.mmap]:
    """A descriptor of `nbytes` of zeros that keep their size, and a writable mapping.

    With `only_writer` this mapping is the last one that can write, where the kernel knows how (Linux 5.1). Raises `ConfigError`.
    """
    descriptor = -1
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        mapping = mmap.mmap(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        if only_writer:
            _seal_writes(descriptor)
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise ConfigError(f"can't take {nbytes} bytes of shared memory for {name}: {error.strerror}") from error
    return descriptor, mapping


def _seal_writes(descriptor: int) -> None:
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FUTURE_WRITE)
    except OSError:
        return  # an older kernel: others of this user could open it anew for writing


def reopened_to_read(descriptor: int) -> int:
    """Another descriptor of the same memory that can only read. Raises `ConfigError`."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"can't open shared memory to read: {error.strerror}; is /proc mounted?") from error


def keeps_its_size(descriptor: int) -> int:
    """Bytes behind a descriptor that somebody passed on, once it is known that they can't go. Raises `ConfigError`."""
    try:
        status, seals = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ConfigError(f"this is no sealed memory: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or not seals & fcntl.F_SEAL_SHRINK:
        raise ConfigError("this memory could be truncated by its owner: it is not sealed against shrinking")
    return status.st_size
