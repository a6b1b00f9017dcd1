"""The device under the SSD log, as the log sees it: named files of fixed size, pages written and read, and a sync.

Theory. Everything the log does to a device goes through `Disk`, so a test can put a device under it that loses unsynced pages, tears
writes or fails. A failing transfer is a value (an errno), since a failing device is a normal event to a cache; only the calls that make or
rename files raise `OSError`.

What `write` has put there may be lost, wholly or in part, until `sync` of that file has answered 0; what is in a new, renamed or removed
*name* may be lost until `sync_directory` has returned. Offsets, lengths and buffer addresses are multiples of `PAGE`. All calls may come
from several threads at once; the log never writes and reads the same pages at the same time on purpose.

`write` and `read` are for single transfers, and wait. For many, `transfers` gives one thread a way to keep several going while it hashes
and copies: `start` one, and ask later which have `ended`.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from kvpool.tier.pages import Bytes

PAGE: Final = 4096
"""Bytes: the unit of every transfer and its alignment, in the file and in memory."""


class Piece(NamedTuple):
    """One transfer: `data`, uint8 `[n * PAGE]` and page-aligned in memory, at byte `offset` of file `name`."""

    name: str
    offset: int
    data: Bytes


class Disk(Protocol):
    """Named files in one flat place."""

    def names(self) -> list[str]:
        """The files there, sorted. Raises `OSError`."""
        ...

    def create(self, name: str, size: int) -> None:
        """A new file of `size` bytes that read as zeros, its room taken. Raises `OSError`: exists, no space, read-only."""
        ...

    def remove(self, name: str) -> None:
        """Raises `OSError`."""
        ...

    def rename(self, old: str, new: str) -> None:
        """Move `old` over `new`. Raises `OSError`."""
        ...

    def size(self, name: str) -> int:
        """Bytes of the file. Raises `OSError`."""
        ...

    def write(self, pieces: Sequence[Piece]) -> list[int]:
        """Write all of each piece, in any order; per piece an errno, 0 when every byte was taken."""
        ...

    def read(self, pieces: Sequence[Piece]) -> list[int]:
        """Fill each piece's `data`; per piece an errno, 0 when every byte was read. Past the end of a file is ENODATA."""
        ...

    def transfers(self, depth: int) -> "Transfers":
        """A way to have up to `depth` transfers under way at once, for one thread at a time."""
        ...

    def sync(self, name: str) -> int:
        """Make what was written to the file before this call survive a power loss; 0 or an errno."""
        ...

    def sync_directory(self) -> None:
        """The same for names. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Give descriptors and locks back; twice is fine."""
        ...


class Transfers(Protocol):
    """Transfers under way. By one thread at a time; a piece's memory must stay until it has ended."""

    def start(self, tag: int, piece: Piece, *, writing: bool) -> None:
        """Begin one, known by `tag`. At most `depth` may be under way."""
        ...

    def ended(self, *, wait: bool) -> list[tuple[int, int]]:
        """Tags of those that have ended since the last call, with an errno each as of `Disk.write`; at least one if told to wait and any
        is under way."""
        ...

    def close(self) -> None:
        """Give back what the kernel keeps for it. What is still under way is not waited for."""
        ...


class AtOnce:
    """Transfers that are over when `start` returns, in the order they were begun: for a disk that has no better way, or no threads."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._ended: list[tuple[int, int]] = []

    def start(self, tag: int, piece: Piece, *, writing: bool) -> None:
        """Do it."""
        self._ended.append((tag, (self._disk.write if writing else self._disk.read)([piece])[0]))

    def ended(self, *, wait: bool) -> list[tuple[int, int]]:
        """Those done since the last call."""
        done, self._ended = self._ended, []
        return done

    def close(self) -> None:
        """Nothing to give back."""
