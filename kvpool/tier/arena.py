"""The DRAM arena: one file in shared memory, a superblock page and then nothing but data.

Theory. The file is created with O_EXCL and mode 0600, and its owner holds an exclusive `flock` on it for as long as it lives. The kernel
drops the lock with the last descriptor, however the owner ends, so "lock obtainable" means "owner dead" and the next owner on the host can
sweep up. Files are only ever unlinked, never truncated: a mapping made before outlives its file, so a reader of a killed owner sees frozen
bytes and no SIGBUS.

**Offsets are relative to the data region.** Byte 0 of `Arena.data` and of `ArenaMapping.data` is offset 0, everywhere in kvpool; only the
superblock knows where the region starts in the file. It is mapped without the superblock, so no stray write can reach the latter.

A descriptor that a forked child inherits keeps the lock alive; start children with exec (Python's descriptors close on exec).

A memory device (`/dev/dax*`) can hold an arena, too. It can't be unlinked, so a successor writes where its predecessor's clients may still
look or even write: it must not start before their leases are over. Readers' checksums turn what went wrong into misses.
"""

import errno
import fcntl
import logging
import mmap
import os
import stat
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from kvpool.errors import ClosedError, ConfigError, FrameError, UnavailableError
from kvpool.tier import mappable
from kvpool.tier.pages import Bytes, ask_for_huge_pages, huge_bytes, lock_pages, make_huge, map_shared, populate, touch
from kvpool.tier.sockets import reap_sockets
from kvpool.tier.space import require_space
from kvpool.tier.superblock import SUPERBLOCK_BYTES, Superblock, decode_superblock, node_bytes
from kvpool.units import GIB, format_size

log = logging.getLogger(__name__)

DEFAULT_DIRECTORY: Final = Path("/dev/shm")
_PREFIX: Final = "kvpool-"
_SUFFIX: Final = ".arena"
_CREATE_TRIES: Final = 8
_POPULATE_LIMIT: Final = 4 * GIB


class _Mapped:
    """A mapped data region and its bounds. The memory lives until the last numpy view of it is gone."""

    def __init__(self, path: Path, superblock: Superblock, data: Bytes) -> None:
        self.path = path
        self.superblock = superblock
        self._data: Bytes | None = data

    @property
    def capacity(self) -> int:
        """Bytes of the data region."""
        return self.superblock.capacity

    @property
    def data(self) -> Bytes:
        """The whole data region, uint8 `[capacity]`. Raises `ClosedError`."""
        if self._data is None:
            raise ClosedError(f"arena {self.path} is closed")
        return self._data

    def view(self, offset: int, length: int) -> Bytes:
        """uint8 `[length]` at `offset` of the data region, no copy. Raises `ConfigError` outside the region, `ClosedError`."""
        data = self.data
        if offset < 0 or length < 0 or offset + length > data.size:
            raise ConfigError(f"range {offset}+{length} is outside an arena of {data.size} bytes")
        return data[offset : offset + length]

    def close(self) -> None:
        """Let the mapping go; twice is fine. Views handed out stay readable."""
        self._data = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Arena(_Mapped):
    """The owner's side: creates the file, keeps its lock, unlinks it on `close()`.

    `huge_bytes`: how much of it is mapped by huge pages; `locked_bytes`: how much can't be swapped out. Both as found right after creation.
    """

    def __init__(self, path: Path, superblock: Superblock, data: Bytes, finish: Callable[[], None], *, lock: bool) -> None:
        super().__init__(path, superblock, data)
        self._finish = weakref.finalize(self, _finish_in, os.getpid(), finish)
        refusal = lock_pages(data) if lock else 0
        self.locked_bytes = data.size if lock and not refusal else 0
        self.huge_bytes = huge_bytes(data)
        log.info(
            "arena %s: %s, of it %s in huge pages, %s locked",
            *(path, format_size(data.size), format_size(self.huge_bytes), format_size(self.locked_bytes)),
        )
        if refusal:
            why = os.strerror(refusal)
            log.warning("arena %s can't be locked in memory: %s; raise RLIMIT_MEMLOCK (ulimit -l), or don't ask for it", path, why)

    @classmethod
    def create(cls, directory: str | Path, node_id: str, incarnation: int, capacity: int, *, lock: bool = False) -> "Arena":
        """Take `capacity` bytes of shared memory in `directory` for node `node_id` (32 hex digits), every page touched.

        `lock` asks that none is ever swapped out. Dead owners' files are swept first. Raises `ConfigError` (no room, no such directory,
        the same node is running already).
        """
        directory = Path(directory).absolute()
        superblock = Superblock(node_id=node_bytes(node_id), incarnation=incarnation, capacity=capacity)
        reap_stale(directory)
        return cls._in_file(directory / f"{_PREFIX}{node_id}-{incarnation}{_SUFFIX}", superblock, lock)

    @classmethod
    def on(cls, path: str | Path, node_id: str, incarnation: int, capacity: int, *, lock: bool = False) -> "Arena":
        """The same at a `path` of the caller's choice: a file, or a memory device. What was there is replaced.

        A file that is there is unlinked and made anew, unless its owner lives; a device keeps what was in its data region. Raises
        `ConfigError`.
        """
        path = Path(path).absolute()
        superblock = Superblock(node_id=node_bytes(node_id), incarnation=incarnation, capacity=capacity)
        if mappable.is_device(path):
            return cls._on_device(path, superblock, lock)
        _unlink_dead(path)
        return cls._in_file(path, superblock, lock)

    @classmethod
    def _in_file(cls, path: Path, superblock: Superblock, lock: bool) -> "Arena":
        require_space(path.parent, superblock.file_bytes)
        descriptor = _create_locked(path)
        try:
            data = _fill(descriptor, superblock)
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            wanted = format_size(superblock.capacity)
            raise ConfigError(f"can't take {wanted} in {path.parent}: {error.strerror}; lower --capacity or free some memory") from error
        return cls(path, superblock, data, lambda: _give_back(path, descriptor), lock=lock)

    @classmethod
    def _on_device(cls, path: Path, superblock: Superblock, lock: bool) -> "Arena":
        superblock = replace(superblock, data_offset=max(SUPERBLOCK_BYTES, mappable.unit_of(path)))
        mapped = mappable.map_owned(path, superblock.file_bytes)
        page = mapped.memory[:SUPERBLOCK_BYTES]
        page[:] = 0
        try:
            data = _map(mapped.descriptor, superblock, superblock.data_offset)
            populate(data)
        except OSError as error:
            mappable.give_back(mapped)
            raise ConfigError(f"can't take {format_size(superblock.capacity)} of {path}: {error.strerror}") from error
        page[:] = np.frombuffer(superblock.encode(), np.uint8)
        return cls(path, superblock, data, lambda: _leave(mapped), lock=lock)

    def close(self) -> None:
        """Unlink the file, drop the lock and the mapping; twice is fine. Processes that mapped it keep their frozen bytes."""
        super().close()
        self._finish()


class ArenaMapping(_Mapped):
    """The other side, in another process of the same user: maps an arena it was told of, for reading and writing."""

    @classmethod
    def open(cls, path: str | Path, node_id: str, incarnation: int, *, populate_limit: int = _POPULATE_LIMIT) -> "ArenaMapping":
        """Map the arena at `path` after checking that it is the one of this node and incarnation.

        Faults in the first `populate_limit` bytes, so that first use is not slow (about 0.2 s a GiB, once). Raises `UnavailableError` when
        the file is not there, not ours, or another node's or incarnation's; `FrameError` when it is not a sound arena.
        """
        path, expected = Path(path), node_bytes(node_id)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UnavailableError(f"arena {path}: {error.strerror}") from error
        try:
            superblock, unit = _read_superblock(descriptor, path)
            if (superblock.node_id, superblock.incarnation) != (expected, incarnation):
                raise UnavailableError(f"arena {path} is of another node or incarnation than {node_id}-{incarnation}")
            data = _map(descriptor, superblock, unit)
            populate(data, populate_limit)
        except OSError as error:
            raise UnavailableError(f"arena {path}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        return cls(path, superblock, data)


def reap_stale(directory: str | Path) -> tuple[Path, ...]:
    """Unlink the arena files and sockets in `directory` whose owner is dead; returns them. Those of other users and live owners stay."""
    reaped: list[Path] = []
    for path in sorted(Path(directory).glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue  # gone meanwhile, or not ours to judge
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            reaped.append(path)
        except OSError:
            continue  # locked: its owner lives; or not ours to unlink
        finally:
            os.close(descriptor)
    return (*reaped, *reap_sockets(Path(directory)))


def _finish_in(process: int, finish: Callable[[], None]) -> None:
    """The end of an owner, by `close`, by garbage collection or at exit; in a forked child nothing, the arena is the parent's."""
    if os.getpid() == process:
        finish()


def _give_back(path: Path, descriptor: int) -> None:
    path.unlink(missing_ok=True)
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # the mapping keeps a duplicate of the descriptor open while views of it live
    os.close(descriptor)


def _leave(mapped: mappable.Mapped) -> None:
    """The end of an arena on a device: nobody maps it as one from now on."""
    mapped.memory[:SUPERBLOCK_BYTES] = 0
    mappable.give_back(mapped)


def _unlink_dead(path: Path) -> None:
    """Make `path` free. Raises `ConfigError` when its owner lives, or it is no file of ours."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"can't open {path}: {error.strerror}; give another path") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is neither a file nor a memory device; give another path")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError as error:
        raise ConfigError(f"{path} belongs to a process that is alive; give each node a path of its own") from error
    except OSError as error:
        raise ConfigError(f"can't replace {path}: {error.strerror}; give another path") from error
    finally:
        os.close(descriptor)


def _create_locked(path: Path) -> int:
    """A descriptor of the new file at `path`, locked. A sweeper may see the file between creation and lock and unlink it: then again."""
    for _ in range(_CREATE_TRIES):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise ConfigError(
                f"{path} exists and its owner is alive: the same node id runs twice on this host; give one another id"
            ) from error
        except OSError as error:
            raise ConfigError(f"can't create {path}: {error.strerror}; choose another arena directory") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink == 1:
                return descriptor
        except BlockingIOError:
            path.unlink(missing_ok=True)
        os.close(descriptor)
    raise ConfigError(f"{path} was swept away {_CREATE_TRIES} times while being created; something else removes files in {path.parent}")


def _fill(descriptor: int, superblock: Superblock) -> Bytes:
    """Give the file its size, its pages and last its superblock; returns the mapped data region."""
    os.ftruncate(descriptor, superblock.file_bytes)
    data = _map(descriptor, superblock)
    ask_for_huge_pages(data)
    try:
        populated = populate(data) == data.size
    except OSError as error:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
    os.posix_fallocate(descriptor, 0, superblock.file_bytes)
    if not populated:
        touch(data)
    make_huge(data)
    os.pwrite(descriptor, superblock.encode(), 0)
    return data


def _map(descriptor: int, superblock: Superblock, unit: int = 1) -> Bytes:
    """The data region; `unit`: 1 for a file, or what the length of a device's mapping must be a multiple of."""
    if unit == 1:
        return map_shared(descriptor, superblock.capacity, superblock.data_offset)
    length = -(-superblock.capacity // unit) * unit
    mapping = mmap.mmap(descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=superblock.data_offset)
    return np.frombuffer(mapping, dtype=np.uint8)[: superblock.capacity]


def _read_superblock(descriptor: int, path: Path) -> tuple[Superblock, int]:
    """The superblock, and the unit of mappings; once it is known to be a device, or a regular file of ours and as long as it says (else a
    read could SIGBUS)."""
    status = os.fstat(descriptor)
    if mappable.is_device_file(status):
        return _read_device(descriptor, path, status.st_rdev)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise UnavailableError(f"arena {path} is not a regular file of this user")
    superblock = decode_superblock(os.pread(descriptor, SUPERBLOCK_BYTES, 0))
    if status.st_size != superblock.file_bytes:
        raise FrameError(f"arena {path} has {status.st_size} bytes, its superblock says {superblock.file_bytes}")
    return superblock, 1


def _read_device(descriptor: int, path: Path, number: int) -> tuple[Superblock, int]:
    try:
        size, unit = mappable.device_shape(number, mappable.SYSFS)
    except ConfigError as error:
        raise UnavailableError(f"arena {path} is neither a regular file nor a memory device") from error
    with mmap.mmap(descriptor, max(unit, SUPERBLOCK_BYTES), mmap.MAP_SHARED, mmap.PROT_READ) as first:
        superblock = decode_superblock(first[:SUPERBLOCK_BYTES])
    if superblock.file_bytes > size:
        raise FrameError(f"arena {path} has {size} bytes, its superblock says {superblock.file_bytes}")
    return superblock, unit
