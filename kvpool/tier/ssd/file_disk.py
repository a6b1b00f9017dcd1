"""A directory of a file system as a `Disk`: O_DIRECT where the file system allows it, `preadv`/`pwritev` that release the GIL.

Theory. The page cache would hold a second copy of what the DRAM tier holds, and would let a write look finished long before it is; so
transfers bypass it. tmpfs and some network file systems refuse O_DIRECT: then the same calls go through the page cache, and `direct` says
so. Transfers run in the thread that asks; depth comes from asking in several threads (see `lanes`). Pieces that follow one another in one
file go out as one system call.

One process at a time owns a directory: an exclusive `flock` on the directory itself, which works without write permission, leaves no
file behind and ends with the process however it ends. Descriptors are opened on first use and at most `MAX_OPEN` of them stay open.
"""

import errno
import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvpool.errors import ConfigError
from kvpool.tier.ssd.disk import Piece

MAX_OPEN: Final = 128
_MAX_VECTORS: Final = 256


class FileDisk:
    """The files of `directory`, made if it is not there. Raises `ConfigError`: not usable, or another process owns it."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._directory = _lock_directory(self.directory)
        self.direct = _takes_direct(self.directory)
        """Whether transfers bypass the page cache."""

    def names(self) -> list[str]:
        """The regular files there, sorted. Raises `OSError`."""
        with os.scandir(self.directory) as found:
            return sorted(entry.name for entry in found if entry.is_file(follow_symlinks=False))

    def create(self, name: str, size: int) -> None:
        """A new file of `size` zero bytes with its room taken. Raises `OSError`."""
        path = self.directory / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Raises `OSError`."""
        self._forget(name)
        (self.directory / name).unlink()

    def rename(self, old: str, new: str) -> None:
        """Move `old` over `new`. Raises `OSError`."""
        self._forget(old)
        self._forget(new)
        (self.directory / old).rename(self.directory / new)

    def size(self, name: str) -> int:
        """Bytes of the file. Raises `OSError`."""
        return (self.directory / name).stat().st_size

    def write(self, pieces: Sequence[Piece]) -> list[int]:
        """Per piece 0 or an errno."""
        return self._each(pieces, writing=True)

    def read(self, pieces: Sequence[Piece]) -> list[int]:
        """Per piece 0 or an errno; ENODATA past the end of the file."""
        return self._each(pieces, writing=False)

    def sync(self, name: str) -> int:
        """0 or the errno of `fdatasync`."""
        try:
            handle = self._take(name)
            try:
                os.fdatasync(handle.descriptor)
            finally:
                self._give(handle)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def sync_directory(self) -> None:
        """Raises `OSError`."""
        os.fsync(self._directory)

    def close(self) -> None:
        """Close every descriptor and drop the lock; twice is fine. A transfer still running closes its own when it ends."""
        with self._lock:
            for name in list(self._open):
                self._drop(name)
            if self._directory >= 0:
                os.close(self._directory)
                self._directory = -1

    def _each(self, pieces: Sequence[Piece], *, writing: bool) -> list[int]:
        if len(pieces) == 1:
            return [self._run(pieces, writing=writing)]
        results: list[int] = []
        for run in _runs(pieces):
            results.extend([self._run(run, writing=writing)] * len(run))
        return results

    def _run(self, run: Sequence[Piece], *, writing: bool) -> int:
        """Transfer pieces that follow one another in one file; an errno."""
        try:
            handle = self._take(run[0].name, writing=writing)
            try:
                _transfer(handle.descriptor, run, writing=writing)
            finally:
                self._give(handle)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def _take(self, name: str, *, writing: bool = False) -> "_Handle":
        """The file's open descriptor, not closed before it is given back. Raises `OSError`."""
        with self._lock:
            if self._directory < 0:
                raise OSError(errno.EBADF, "the disk is closed")
            handle = self._open.get(name)
            if handle is not None and writing and not handle.writable:  # opened while that wasn't allowed; it may be now
                self._drop(name)
                handle = None
            if handle is None:
                handle = self._open[name] = _Handle(*_open_file(self.directory / name, direct=self.direct))
                for other in list(self._open)[: max(0, len(self._open) - MAX_OPEN)]:
                    self._drop(other)
            else:
                self._open.move_to_end(name)
            if writing and not handle.writable:
                raise OSError(errno.EROFS, "the file can only be read")
            handle.users += 1
            return handle

    def _give(self, handle: "_Handle") -> None:
        with self._lock:
            handle.users -= 1
            if handle.doomed and not handle.users:
                os.close(handle.descriptor)

    def _forget(self, name: str) -> None:
        with self._lock:
            if name in self._open:
                self._drop(name)

    def _drop(self, name: str) -> None:
        """Close the file's descriptor now, or when its last user is done. The lock is held."""
        handle = self._open.pop(name)
        handle.doomed = True
        if not handle.users:
            os.close(handle.descriptor)


class _Handle:
    """An open descriptor, how many transfers use it, and whether the last of them closes it."""

    __slots__ = ("descriptor", "doomed", "users", "writable")

    def __init__(self, descriptor: int, writable: bool) -> None:
        self.descriptor, self.writable, self.users, self.doomed = descriptor, writable, 0, False


def _runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Pieces grouped into runs that follow one another in one file."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (piece.name != run[0].name or piece.offset != run[-1].offset + run[-1].data.size or len(run) == _MAX_VECTORS):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _transfer(descriptor: int, run: Sequence[Piece], *, writing: bool) -> None:
    """All bytes of a run, however many calls the kernel makes of it. Raises `OSError`."""
    vectors = [piece.data.data for piece in run]
    offset, left = run[0].offset, sum(piece.data.size for piece in run)
    call = os.pwritev if writing else os.preadv
    while True:
        count = call(descriptor, vectors, offset)
        if count <= 0:
            raise OSError(errno.EIO if writing else errno.ENODATA, "short transfer")
        left -= count
        if not left:
            return
        offset += count
        while count and count >= vectors[0].nbytes:
            count -= vectors.pop(0).nbytes
        if count:
            vectors[0] = vectors[0][count:]


def _lock_directory(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"can't use {directory} for the SSD tier: {error.strerror}; choose a directory on a local disk") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"{directory} is in use by another node; give each node its own directory") from error
    return descriptor


def _takes_direct(directory: Path) -> bool:
    """Whether files of this directory open with O_DIRECT: tried on a nameless file, or on any file there when it is read-only."""
    try:
        os.close(os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600))
        return True
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
    for path in sorted(directory.iterdir()):
        if path.is_file():
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
                return True
            except OSError:
                return False
    return False


def _open_file(path: Path, *, direct: bool) -> tuple[int, bool]:
    """A descriptor for reading and writing, or for reading only where writing isn't allowed, and which."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
    try:
        return os.open(path, os.O_RDWR | flags), True
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        return os.open(path, os.O_RDONLY | flags), False
