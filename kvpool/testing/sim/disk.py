"""A disk that can do everything a real one does wrong, behind the SSD log's `Disk` Protocol.

Theory. A file has two contents: what reads see, and what survives a power loss. A write changes the first; `sync` copies the pages
written since into the second. At a power loss each page not synced yet is kept, lost, or torn, by chance; names that were
created, renamed or removed since the last `sync_directory` are undone from the newest on, down to a chance place. A killed process
loses nothing written, but makes nothing safe either.

Faults are armed by whoever runs the world: the n-th call from now dies in its middle (`Crash`), writes fail, stop short or land elsewhere,
a sync fails and its pages are dropped though reads still show them (as Linux does), the disk is full or read-only, a bit flips at rest. A
disk that *lies* (answers 0 and writes elsewhere, or rots) may lose what was acknowledged; the log may then only not serve it.
"""

import errno
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from kvpool.tier.ssd.disk import PAGE, AtOnce, Piece, Transfers

_TEAR = 64  # finer than any device tears, so that small records are torn too
_AIMS = 64


class Crash(BaseException):
    """The process dies here. Not an `Exception`: nobody may catch it on the way out."""


@dataclass(slots=True, kw_only=True)
class DiskFaults:
    """What a disk may do wrong, as chances per piece or call, and switches. All off at first."""

    write_error: float = 0.0
    read_error: float = 0.0
    short_write: float = 0.0
    sync_error: float = 0.0
    misdirected: float = 0.0
    full: bool = False
    read_only: bool = False
    slow_ns: int = 0
    """How much later it is after each call."""
    crash_in: int = 0
    """Die in the n-th call from now that changes something; 0: don't."""


class _File:
    """`now`: what reads see. `stable`: what survives. `dirty`: pages written since the last sync, in order of their first write;
    `dropped`: those a failed sync gave up.
    """

    __slots__ = ("dirty", "dropped", "now", "stable")

    def __init__(self, size: int) -> None:
        self.now = bytearray(size)
        self.stable = bytearray(size)
        self.dirty: dict[int, None] = {}
        self.dropped: dict[int, None] = {}

    def put(self, offset: int, data: memoryview) -> None:
        self.now[offset : offset + len(data)] = data
        for page in range(offset // PAGE, -(-(offset + len(data)) // PAGE)):
            self.dirty[page] = None
            self.dropped.pop(page, None)

    def settle(self) -> None:
        for page in self.dirty:
            at = page * PAGE
            self.stable[at : at + PAGE] = self.now[at : at + PAGE]
        self.dirty.clear()


class SimDisk:
    """The disk of one simulated node; it outlives the node's lives. Implements `kvpool.tier.ssd.disk.Disk`, synchronously."""

    def __init__(self, capacity_bytes: int, rng: Random) -> None:
        self.faults = DiskFaults()
        self.capacity_bytes = capacity_bytes
        self.read_failures = 0
        self.lost_ns = 0
        """Time that slow calls have taken, all together."""
        self.lied = False
        """Whether a misdirected write or a flipped bit may have damaged something synced."""
        self._rng = rng
        self._files: dict[str, _File] = {}
        self._names_pending: list[tuple[str, str, str, _File | None]] = []  # (what, name, other name, file that was there)

    # The Protocol

    def names(self) -> list[str]:
        """The files there."""
        return sorted(self._files)

    def create(self, name: str, size: int) -> None:
        """A file of zeros; ENOSPC when the disk is full."""
        self._call()
        self._writable()
        if name in self._files:
            raise FileExistsError(errno.EEXIST, "exists", name)
        if self.faults.full or sum(len(file.now) for file in self._files.values()) + size > self.capacity_bytes:
            raise OSError(errno.ENOSPC, "no space left", name)
        self._files[name] = _File(size)
        self._names_pending.append(("create", name, "", None))

    def remove(self, name: str) -> None:
        """Unlink."""
        self._call()
        self._writable()
        self._names_pending.append(("remove", name, "", self._file(name)))
        del self._files[name]

    def rename(self, old: str, new: str) -> None:
        """Move over."""
        self._call()
        self._writable()
        file = self._file(old)
        self._names_pending.append(("rename", old, new, self._files.get(new)))
        del self._files[old]
        self._files[new] = file

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return len(self._file(name).now)

    def write(self, pieces: Sequence[Piece]) -> list[int]:
        """Put pieces; a crash leaves some of them done, and one perhaps in part."""
        dies = self._dies()
        order = list(range(len(pieces)))
        if dies:
            self._rng.shuffle(order)
            order = order[: self._rng.randint(0, len(order))]
        results = [0] * len(pieces)
        for index in order:
            results[index] = self._write(pieces[index], torn=dies and index == order[-1])
        if dies:
            raise Crash
        return results

    def read(self, pieces: Sequence[Piece]) -> list[int]:
        """Fill pieces."""
        self.lost_ns += self.faults.slow_ns
        return [self._read(piece) for piece in pieces]

    def transfers(self, depth: int) -> Transfers:
        """One after the other."""
        return AtOnce(self)

    def sync(self, name: str) -> int:
        """Make pages survive; when it fails they are dropped, and no later sync will write them."""
        file = self._files.get(name)
        if file is None:
            return errno.ENOENT
        if self._dies():
            for page in [page for page in file.dirty if self._rng.random() < 0.5]:
                file.stable[page * PAGE : (page + 1) * PAGE] = file.now[page * PAGE : (page + 1) * PAGE]
                del file.dirty[page]
            raise Crash
        if self._chance(self.faults.sync_error):
            file.dropped.update(file.dirty)
            file.dirty.clear()
            return errno.EIO
        file.settle()
        return 0

    def sync_directory(self) -> None:
        """Make names survive."""
        self._call()
        self._names_pending.clear()

    def close(self) -> None:
        """Nothing to give back."""

    # What befalls a disk

    def kill(self) -> None:
        """The process died, the machine goes on: whatever was written is there to be read, but not yet sure to survive."""
        for file in self._files.values():
            file.dirty.update(file.dropped)
            file.dropped.clear()

    def lose_power(self) -> None:
        """What was not synced is kept, lost or torn."""
        keep = self._rng.randint(0, len(self._names_pending))
        for what, name, other, before in reversed(self._names_pending[keep:]):
            self._undo(what, name, other, before)
        self._names_pending.clear()
        for file in self._files.values():
            for page in file.dirty:
                at, fate = page * PAGE, self._rng.random()
                end = at + (PAGE if fate < 0.3 else self._cut(PAGE) if fate < 0.7 else 0)
                file.stable[at:end] = file.now[at:end]
            file.dirty.clear()
            file.dropped.clear()
            file.now[:] = file.stable

    def flip_bit(self) -> bool:
        """One bit of one file rots, unseen. False without files."""
        files = [file for _, file in sorted(self._files.items()) if file.now]
        if not files:
            return False
        file = files[self._rng.randrange(len(files))]
        at, bit = self._rng.randrange(len(file.now)), 1 << self._rng.randrange(8)
        for _ in range(_AIMS):  # where something was written, if that is found soon
            if file.now[at]:
                break
            at = self._rng.randrange(len(file.now))
        file.now[at] ^= bit
        file.stable[at] ^= bit
        self.lied = True
        return True

    def snapshot_crc(self, crc: int) -> int:
        """A checksum over everything reads see, for digests."""
        for name, file in sorted(self._files.items()):
            crc = zlib.crc32(file.now, zlib.crc32(name.encode(), crc))
        return crc

    # Parts

    def _write(self, piece: Piece, *, torn: bool) -> int:
        name, offset, data = piece
        if self.faults.read_only:
            return errno.EROFS
        if self.faults.full:
            return errno.ENOSPC
        if self._chance(self.faults.write_error):
            return errno.EIO
        file = self._files.get(name)
        if file is None:
            return errno.ENOENT
        if offset % PAGE or data.nbytes % PAGE or offset + data.nbytes > len(file.now):
            return errno.EINVAL
        view = data.data.cast("B")
        if torn or self._chance(self.faults.short_write):
            file.put(offset, view[: self._cut(len(view))])
            return errno.EIO
        if self._chance(self.faults.misdirected):
            self.lied = True
            room = (len(file.now) - len(view)) // PAGE
            offset = self._rng.randint(0, room) * PAGE
        file.put(offset, view)
        return 0

    def _read(self, piece: Piece) -> int:
        name, offset, data = piece
        file = self._files.get(name)
        if file is None:
            return errno.ENOENT
        if offset + data.nbytes > len(file.now):
            return errno.ENODATA
        if self._chance(self.faults.read_error):
            self.read_failures += 1
            return errno.EIO
        data[:] = np.frombuffer(file.now, np.uint8, data.nbytes, offset)
        return 0

    def _undo(self, what: str, name: str, other: str, before: _File | None) -> None:
        if what == "create":
            self._files.pop(name, None)
        elif what == "remove":
            if before is not None:
                self._files[name] = before
        else:
            self._files[name] = self._files.pop(other)
            if before is not None:
                self._files[other] = before

    def _file(self, name: str) -> _File:
        file = self._files.get(name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return file

    def _writable(self) -> None:
        if self.faults.read_only:
            raise OSError(errno.EROFS, "read-only")

    def _call(self) -> None:
        if self._dies():
            raise Crash

    def _dies(self) -> bool:
        self.lost_ns += self.faults.slow_ns
        if self.faults.crash_in:
            self.faults.crash_in -= 1
            return self.faults.crash_in == 0
        return False

    def _cut(self, length: int) -> int:
        """Where a write of `length` bytes is torn: anywhere, or near its start, where small records lie."""
        return self._rng.randrange(0, self._rng.choice((length, min(length, 1024))), _TEAR)

    def _chance(self, chance: float) -> bool:
        return chance > 0.0 and self._rng.random() < chance
