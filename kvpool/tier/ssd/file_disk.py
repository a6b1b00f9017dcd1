"""A directory of a file system as a `Disk`: O_DIRECT where the file system allows it, many transfers at once where the kernel does.

Theory. The page cache would hold a second copy of what the DRAM tier holds, and would let a write look finished long before it is; so
transfers bypass it. tmpfs and some network file systems refuse O_DIRECT: then the same calls go through the page cache, and `direct` says
so. `transfers` are the kernel's own asynchronous ones (see `aio`). Where it has none, or has none left to give, they are `preadv` and
`pwritev` in threads, and `asynchronous` says so. `write` and `read` run in the thread that asks; pieces that follow one another in one file
go out as one system call.

One process at a time owns a directory: an exclusive `flock` on the directory itself, which works without write permission, leaves no
file behind and ends with the process however it ends.
"""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvpool.errors import ConfigError
from kvpool.tier.ssd.aio import KernelTransfers
from kvpool.tier.ssd.disk import Piece, Transfers
from kvpool.tier.ssd.handles import Handles
from kvpool.tier.ssd.pooled import PooledTransfers

log = logging.getLogger(__name__)

_MAX_VECTORS: Final = 256


class FileDisk:
    """The files of `directory`, made if it is not there. Raises `ConfigError`: not usable, or another process owns it."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()
        self._directory = _lock_directory(self.directory)
        self.direct = _takes_direct(self.directory)
        """Whether transfers bypass the page cache."""
        self.asynchronous = self.direct
        """Whether the kernel carries out `transfers` by itself: False once they had to be given to threads."""
        self._handles = Handles(self.directory, direct=self.direct)

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
        self._handles.forget(name)
        (self.directory / name).unlink()

    def rename(self, old: str, new: str) -> None:
        """Move `old` over `new`. Raises `OSError`."""
        self._handles.forget(old)
        self._handles.forget(new)
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

    def transfers(self, depth: int) -> Transfers:
        """Up to `depth` at once."""
        if self.direct:
            try:
                return KernelTransfers(self._handles, depth, self._carry_out)
            except OSError as error:
                if self.asynchronous:
                    log.warning("ssd: no asynchronous transfers from the kernel (%s); threads carry them out", error.strerror)
                self.asynchronous = False
        return PooledTransfers(depth, self._carry_out)

    def sync(self, name: str) -> int:
        """0 or the errno of `fdatasync`."""
        try:
            handle = self._handles.take(name)
            try:
                os.fdatasync(handle.descriptor)
            finally:
                self._handles.give(handle)
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    def sync_directory(self) -> None:
        """Raises `OSError`."""
        os.fsync(self._directory)

    def close(self) -> None:
        """Close every descriptor and drop the lock; twice is fine. A transfer still running closes its own when it ends."""
        self._handles.close()
        directory, self._directory = self._directory, -1
        if directory >= 0:
            os.close(directory)

    def _carry_out(self, piece: Piece, writing: bool) -> int:
        return self._run([piece], writing=writing)

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
            handle = self._handles.take(run[0].name, writing=writing)
            try:
                _transfer(handle.descriptor, run, writing=writing)
            finally:
                self._handles.give(handle)
        except OSError as error:
            return error.errno or errno.EIO
        return 0


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
