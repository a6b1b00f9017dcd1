"""Open descriptors of one directory's files: opened on first use, shared, and at most `MAX_OPEN` of them kept open."""

import errno
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final

MAX_OPEN: Final = 128


class Handle:
    """An open descriptor, how many transfers use it, and whether the last of them closes it."""

    __slots__ = ("descriptor", "doomed", "users", "writable")

    def __init__(self, descriptor: int, writable: bool) -> None:
        self.descriptor, self.writable, self.users, self.doomed = descriptor, writable, 0, False


class Handles:
    """Descriptors of the files of `directory`, with O_DIRECT if `direct`. Thread-safe."""

    def __init__(self, directory: Path, *, direct: bool) -> None:
        self._directory, self._direct = directory, direct
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Handle] = OrderedDict()
        self._closed = False

    def take(self, name: str, *, writing: bool = False) -> Handle:
        """The file's open descriptor, not closed before it is given back. Raises `OSError`."""
        with self._lock:
            if self._closed:
                raise OSError(errno.EBADF, "the disk is closed")
            handle = self._open.get(name)
            if handle is not None and writing and not handle.writable:  # opened while that wasn't allowed; it may be now
                self._drop(name)
                handle = None
            if handle is None:
                handle = self._open[name] = Handle(*_open_file(self._directory / name, direct=self._direct))
                for other in list(self._open)[: max(0, len(self._open) - MAX_OPEN)]:
                    self._drop(other)
            else:
                self._open.move_to_end(name)
            if writing and not handle.writable:
                raise OSError(errno.EROFS, "the file can only be read")
            handle.users += 1
            return handle

    def give(self, handle: Handle) -> None:
        """Its user is done."""
        with self._lock:
            handle.users -= 1
            if handle.doomed and not handle.users:
                os.close(handle.descriptor)

    def forget(self, name: str) -> None:
        """The name means another file from now on, or none."""
        with self._lock:
            if name in self._open:
                self._drop(name)

    def close(self) -> None:
        """Close all; one that is in use is closed by its last user. Twice is fine."""
        with self._lock:
            self._closed = True
            for name in list(self._open):
                self._drop(name)

    def _drop(self, name: str) -> None:
        """Close the file's descriptor now, or when its last user is done. The lock is held."""
        handle = self._open.pop(name)
        handle.doomed = True
        if not handle.users:
            os.close(handle.descriptor)


def _open_file(path: Path, *, direct: bool) -> tuple[int, bool]:
    """A descriptor for reading and writing, or for reading only where writing isn't allowed, and which."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
    try:
        return os.open(path, os.O_RDWR | flags), True
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return os.open(path, os.O_RDONLY | flags), False
