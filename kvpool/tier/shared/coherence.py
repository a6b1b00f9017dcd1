"""What it takes, on one kind of memory, that others see what was written.

`Coherent`: all who map it see one memory. So it is for processes of one host, whatever they map, and for hosts that share memory whose
hardware keeps caches alike (CXL 3 with back-invalidation). Nothing to do.

`FileSync`: also what is behind the file gets the bytes (`msync`), for files on storage that something other than this kernel reads. Readers
through this kernel need nothing more.

Memory shared by hosts whose caches are *not* kept alike needs an object that writes back and drops cache lines (`clwb`, `clflushopt`) over
the range it is given, on both sides. There is none here; the two calls are where it goes, and the protocol is tested against a model
of such memory (`kvpool.testing.noncoherent`).
"""

import mmap
from typing import Protocol

from kvpool.tier.mappable import Mapped, is_in_memory


class Coherence(Protocol):
    """Flush and invalidate of one kind of memory; both may come from several threads and may raise `OSError`."""

    @property
    def name(self) -> str:
        """What an operator sees."""
        ...

    def flush(self, mapping: mmap.mmap, offset: int, length: int) -> None:
        """Others see this range's bytes as of now once they invalidated it."""
        ...

    def invalidate(self, mapping: mmap.mmap, offset: int, length: int) -> None:
        """The next read of this range sees what others flushed."""
        ...


class Coherent:
    """One memory for all."""

    name = "coherent"

    def flush(self, mapping: mmap.mmap, offset: int, length: int) -> None:
        """Nothing to do."""

    def invalidate(self, mapping: mmap.mmap, offset: int, length: int) -> None:
        """Nothing to do."""


class FileSync:
    """A file on storage: `msync` of the pages the range touches."""

    name = "msync"

    def flush(self, mapping: mmap.mmap, offset: int, length: int) -> None:
        """Write the pages back. Raises `OSError`."""
        if length:
            start = offset - offset % mmap.PAGESIZE
            mapping.flush(start, min(offset + length, len(mapping)) - start)

    def invalidate(self, mapping: mmap.mmap, offset: int, length: int) -> None:
        """Nothing to do: the kernel's pages are the newest there are."""


def coherence_for(mapped: Mapped) -> Coherence:
    """The one for what was mapped: `Coherent` for memory, `FileSync` for a file on storage."""
    return Coherent() if mapped.is_device or is_in_memory(mapped.path) else FileSync()
