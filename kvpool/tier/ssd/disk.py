"""The device under the SSD log, as the log sees it: named files of fixed size, pages written and read, and a sync.

Theory. Everything the log does to a device goes through `Disk`, so a test can put a device under it that loses unsynced pages, tears
writes or fails. A failing transfer is a value (an errno), since a failing device is a normal event to a cache; only the calls that make or
rename files raise `OSError`.

What `write` has put there may be lost, wholly or in part, until `sync` of that file has answered 0; what is in a new, renamed or removed
*name* may be lost until `sync_directory` has returned. Offsets, lengths and buffer addresses are multiples of `PAGE`. All calls may come
from several threads at once; the log never writes and reads the same pages at the same time on purpose.
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

    def sync(self, name: str) -> int:
        """Make what was written to the file before this call survive a power loss; 0 or an errno."""
        ...

    def sync_directory(self) -> None:
        """The same for names. Raises `OSError`."""
        ...

    def close(self) -> None:
        """Give descriptors and locks back; twice is fine."""
        ...
