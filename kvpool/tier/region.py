"""A run of bytes that a tier keeps records in, whatever they are made of.

Theory. Some memory is seen by others only after the writer's caches were written back, and shows a reader old bytes until the reader's
caches were emptied. So the two points where that happens are part of the interface: `flush` after a write that others must see, and
`invalidate` before a read of what others wrote. Where hardware keeps all views alike both cost nothing. A program that is right on a region
whose views differ until flushed (`kvpool.testing.noncoherent`) is right on all of them.

A device that fails raises `OSError`; whoever uses a region turns that into a value.
"""

from typing import Final, Protocol

import numpy as np

from kvpool.errors import ClosedError, ConfigError
from kvpool.tier.pages import Bytes

LINE_BYTES: Final = 64
"""What a cache writes back and forgets at once, on x86-64 and most others."""


class Region(Protocol):
    """Bytes at offsets `0..capacity`. All calls may come from several threads.

    Ranges outside are a `ConfigError`; reads and writes after `close` a `ClosedError`.
    """

    @property
    def capacity(self) -> int:
        """Bytes."""
        ...

    def write(self, offset: int, data: Bytes) -> None:
        """Copy uint8 `[n]` in. Raises `OSError` when the device fails."""
        ...

    def read(self, offset: int, into: Bytes) -> None:
        """Copy uint8 `[n]` out. Raises `OSError` when the device fails."""
        ...

    def flush(self, offset: int, length: int) -> None:
        """Afterwards every other view that invalidates the range sees what this one wrote there."""
        ...

    def invalidate(self, offset: int, length: int) -> None:
        """Forget what this view remembers of the range; the next read sees what others flushed."""
        ...

    def close(self) -> None:
        """Give it back; twice is fine."""
        ...


def check_range(offset: int, length: int, capacity: int) -> None:
    """Raise `ConfigError` unless `offset`..`offset + length` lies inside `capacity` bytes."""
    if offset < 0 or length < 0 or offset + length > capacity:
        raise ConfigError(f"range {offset}+{length} is outside a region of {capacity} bytes")


class BytesRegion:
    """Bytes of this process: a new numpy array of zeros, or one given."""

    def __init__(self, memory: int | Bytes) -> None:
        """`memory`: how many bytes, or uint8 `[capacity]` to use. Raises `ConfigError` below one byte."""
        if isinstance(memory, int):
            memory = np.zeros(max(0, memory), np.uint8)
        if memory.size < 1:
            raise ConfigError("a region needs at least one byte")
        self._bytes: Bytes | None = memory
        self._capacity = memory.size

    @property
    def capacity(self) -> int:
        """Bytes."""
        return self._capacity

    def write(self, offset: int, data: Bytes) -> None:
        """Copy in."""
        self._view(offset, data.size)[:] = data

    def read(self, offset: int, into: Bytes) -> None:
        """Copy out."""
        into[:] = self._view(offset, into.size)

    def flush(self, offset: int, length: int) -> None:
        """Nothing to do: one process, one view."""
        check_range(offset, length, self._capacity)

    def invalidate(self, offset: int, length: int) -> None:
        """Nothing to do: one process, one view."""
        check_range(offset, length, self._capacity)

    def close(self) -> None:
        """Let the memory go."""
        self._bytes = None

    def _view(self, offset: int, length: int) -> Bytes:
        memory = self._bytes
        if memory is None:
            raise ClosedError("this region is closed")
        check_range(offset, length, self._capacity)
        return memory[offset : offset + length]


class Window:
    """Part of a region as a region of its own: offset 0 is byte `start` of the whole. Closing it closes the whole."""

    def __init__(self, whole: Region, start: int, length: int) -> None:
        check_range(start, length, whole.capacity)
        self._whole, self._start, self._length = whole, start, length

    @property
    def capacity(self) -> int:
        """Bytes of the window."""
        return self._length

    def write(self, offset: int, data: Bytes) -> None:
        """Copy in."""
        check_range(offset, data.size, self._length)
        self._whole.write(self._start + offset, data)

    def read(self, offset: int, into: Bytes) -> None:
        """Copy out."""
        check_range(offset, into.size, self._length)
        self._whole.read(self._start + offset, into)

    def flush(self, offset: int, length: int) -> None:
        """Flush that part of the whole."""
        check_range(offset, length, self._length)
        self._whole.flush(self._start + offset, length)

    def invalidate(self, offset: int, length: int) -> None:
        """Invalidate that part of the whole."""
        check_range(offset, length, self._length)
        self._whole.invalidate(self._start + offset, length)

    def close(self) -> None:
        """Close the whole."""
        self._whole.close()
