"""What it takes, on one kind of memory, that others see what was written.

`Coherent`: all who map it see one memory. So it is for processes of one host, whatever they map, and for hosts that share memory whose
hardware keeps caches alike (CXL 3 with back-invalidation). Nothing to do.

`FileSync`: also what is behind the file gets the bytes (`msync`), for files on storage that something other than this kernel reads. Readers
through this kernel need nothing more.

`CacheLines`: memory shared by hosts whose caches are *not* kept alike. Lines of the range are written back and dropped, on both sides, by
`libpmem`, the one library that gives cache line flushes to a program that isn't C. It takes CLFLUSHOPT (CLFLUSH on older CPUs) because
`PMEM_NO_CLWB` is set while it is loaded: CLWB may leave the line in the cache, and a reader must be rid of it. It is never chosen by
itself: whoever shares a device between such hosts asks for it. The protocol is tested against a model of such memory
(`kvpool.testing.noncoherent`).
"""

import ctypes
import mmap
import os
from typing import Final, Protocol

import numpy as np

from kvpool.errors import ConfigError
from kvpool.tier.mappable import Mapped, is_in_memory

_LIBPMEM: Final = "libpmem.so.1"
_NO_CLWB: Final = "PMEM_NO_CLWB"


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


class CacheLines:
    """Cache lines written back and dropped by libpmem. Raises `ConfigError` where the library isn't installed."""

    name = "cache-lines"

    def __init__(self) -> None:
        library = _load_libpmem()
        self._persist = library.pmem_persist  # flushes each line, then fences
        self._persist.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._persist.restype = None

    def flush(self, mapping: mmap.mmap, offset: int, length: int) -> None:
        """Write back and drop."""
        if length:
            self._persist(np.frombuffer(mapping, np.uint8).ctypes.data + offset, length)

    def invalidate(self, mapping: mmap.mmap, offset: int, length: int) -> None:
        """The same: clean lines are dropped, and a reader has no others."""
        self.flush(mapping, offset, length)


def _load_libpmem() -> ctypes.CDLL:
    before = os.environ.get(_NO_CLWB)
    os.environ[_NO_CLWB] = "1"  # read once, when the library is loaded
    try:
        return ctypes.CDLL(_LIBPMEM)
    except OSError as error:
        raise ConfigError(f"flushing cache lines needs {_LIBPMEM}: apt-get install libpmem1, on each host that maps this memory") from error
    finally:
        if before is None:
            del os.environ[_NO_CLWB]
        else:
            os.environ[_NO_CLWB] = before


def coherence_for(mapped: Mapped) -> Coherence:
    """The one for what was mapped: `Coherent` for memory, `FileSync` for a file on storage."""
    return Coherent() if mapped.is_device or is_in_memory(mapped.path) else FileSync()
