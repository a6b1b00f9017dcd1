"""A mapped path as a region, with the flush points its memory needs."""

import os
import weakref
from pathlib import Path
from typing import Self

from kvpool.errors import ClosedError
from kvpool.tier.mappable import Mapped, give_back, map_owned, map_to_read
from kvpool.tier.pages import Bytes
from kvpool.tier.region import check_range
from kvpool.tier.shared.coherence import Coherence, coherence_for


class SharedRegion:
    """`Region` over a mapping. Its owner gives it back with `close`, by garbage collection or at exit; a forked child never does."""

    def __init__(self, mapped: Mapped, coherence: Coherence | None = None) -> None:
        """`coherence`: None takes the one that fits the path (`coherence_for`)."""
        self._mapped: Mapped | None = mapped
        self._capacity = mapped.memory.size
        self.path = mapped.path
        self.coherence = coherence or coherence_for(mapped)
        self._finish = weakref.finalize(self, _give_back, mapped, os.getpid())

    @classmethod
    def own(cls, path: str | Path, nbytes: int, coherence: Coherence | None = None) -> Self:
        """Take `path` and map at least `nbytes` of it. Raises `ConfigError`."""
        return cls(map_owned(Path(path).absolute(), nbytes), coherence)

    @classmethod
    def attach(cls, path: str | Path, coherence: Coherence | None = None) -> Self:
        """Map all of `path` for reading only. Raises `UnavailableError`."""
        return cls(map_to_read(Path(path).absolute()), coherence)

    @property
    def capacity(self) -> int:
        """Bytes."""
        return self._capacity

    def write(self, offset: int, data: Bytes) -> None:
        """Copy in."""
        mapped = self._range(offset, data.size)
        mapped.memory[offset : offset + data.size] = data

    def read(self, offset: int, into: Bytes) -> None:
        """Copy out."""
        mapped = self._range(offset, into.size)
        into[:] = mapped.memory[offset : offset + into.size]

    def flush(self, offset: int, length: int) -> None:
        """As the memory needs it. Raises `OSError`."""
        self.coherence.flush(self._range(offset, length).mapping, offset, length)

    def invalidate(self, offset: int, length: int) -> None:
        """As the memory needs it. Raises `OSError`."""
        self.coherence.invalidate(self._range(offset, length).mapping, offset, length)

    def close(self) -> None:
        """Unlink the file if it was made here, drop the lock and the mapping; twice is fine."""
        self._mapped = None
        self._finish()

    def _range(self, offset: int, length: int) -> Mapped:
        mapped = self._mapped
        if mapped is None:
            raise ClosedError(f"shared region {self.path} is closed")
        check_range(offset, length, self._capacity)
        return mapped


def _give_back(mapped: Mapped, process: int) -> None:
    if mapped.descriptor >= 0 and os.getpid() == process:
        give_back(mapped)
