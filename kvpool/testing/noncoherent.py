"""Memory whose caches are not kept alike, in software: every view has a cache of its own.

Theory. What a view writes stays in its cache until `flush`, or until the cache throws the line out for reasons of its own. What it read
stays there, too, and is read again until `invalidate`, whatever others have written since. Lines come in unasked as well, as a prefetcher
brings them. A store is torn: half of a line's new bytes may leave before the other half is written. Which of these happens is drawn from
the random source given, so a seed repeats a run.

It is harsher than hardware: the cache is endless, so nothing is ever seen by luck for long.
"""

import random
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from kvpool.errors import ClosedError
from kvpool.tier.pages import Bytes
from kvpool.tier.region import LINE_BYTES, check_range

_WORD: Final = 8
_NEAR: Final = 4


def _nothing() -> None:
    """No step to tell of."""


class NonCoherentShim:
    """One view, a `Region`, of `memory` (uint8 `[capacity]`, shared by all views of it).

    `whim` is the chance, at every line touched, that one line leaves by itself, and that one comes by itself. `step` is called before every
    call and every line: a scheduler gives others their turn there, and a test may raise there.
    """

    def __init__(self, memory: Bytes, chance: random.Random, *, whim: float = 0.02, step: Callable[[], None] = _nothing) -> None:
        self._memory, self._chance, self._whim, self._step = memory, chance, whim, step
        self._lines: dict[int, Bytes] = {}
        self._dirty: dict[int, None] = {}
        self._lock = threading.RLock()
        self._closed = False

    @property
    def capacity(self) -> int:
        """Bytes."""
        return self._memory.size

    def write(self, offset: int, data: Bytes) -> None:
        """Into the cache, line by line; a line may leave half written."""
        with self._lock:
            self._begin(offset, data.size)
            done = 0
            for line, start, end in self._pieces(offset, data.size):
                self._touch(line)
                for first, last in self._parts(start, end):
                    self._fetch(line)[first:last] = data[done : done + last - first]
                    self._dirty[line] = None
                    done += last - first
                    if last != end:
                        self._evict(line)

    def read(self, offset: int, into: Bytes) -> None:
        """From the cache, else from the memory into the cache."""
        with self._lock:
            self._begin(offset, into.size)
            done = 0
            for line, start, end in self._pieces(offset, into.size):
                self._touch(line)
                into[done : done + end - start] = self._fetch(line)[start:end]
                done += end - start

    def flush(self, offset: int, length: int) -> None:
        """Write the range's changed lines to the memory, in any order; they stay in the cache."""
        with self._lock:
            self._begin(offset, length)
            lines = [line for line, _, _ in self._pieces(offset, length) if line in self._dirty]
            self._chance.shuffle(lines)
            for line in lines:
                self._touch(line)
                self._write_back(line)

    def invalidate(self, offset: int, length: int) -> None:
        """Forget the range's lines; changed ones are written to the memory first."""
        with self._lock:
            self._begin(offset, length)
            for line, _, _ in self._pieces(offset, length):
                self._evict(line)

    def close(self) -> None:
        """The view ends; what was not flushed is lost."""
        self._closed = True

    def crash(self) -> None:
        """Its host dies: each changed line left just before, or not at all; nothing comes later."""
        for line in list(self._dirty):
            if self._chance.random() < 0.5:
                self._write_back(line)
        self.close()

    def _begin(self, offset: int, length: int) -> None:
        if self._closed:
            raise ClosedError("this view is closed")
        check_range(offset, length, self.capacity)
        self._step()

    def _pieces(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        """Per line the range touches: its number, and from where to where in it."""
        first, end = offset // LINE_BYTES, offset + length
        lines = range(first, -(-end // LINE_BYTES)) if length else range(0)
        return [(n, max(0, offset - n * LINE_BYTES), min(LINE_BYTES, end - n * LINE_BYTES)) for n in lines]

    def _parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """The stores one line's write is made of: one, or now and then two, cut at a word."""
        cut = self._chance.randrange(0, LINE_BYTES, _WORD)
        return [(start, cut), (cut, end)] if start < cut < end and self._chance.random() < self._whim else [(start, end)]

    def _touch(self, line: int) -> None:
        """Others' turn, and the cache's own whims."""
        self._step()
        if self._chance.random() < self._whim and self._lines:
            self._evict(self._chance.choice(list(self._lines)))
        if self._chance.random() < self._whim:
            near = line + self._chance.randint(-_NEAR, _NEAR)
            if 0 <= near * LINE_BYTES < self.capacity:
                self._fetch(near)

    def _fetch(self, line: int) -> Bytes:
        cached = self._lines.get(line)
        if cached is None:
            cached = self._lines[line] = self._memory[line * LINE_BYTES : (line + 1) * LINE_BYTES].copy()
        return cached

    def _write_back(self, line: int) -> None:
        if line in self._dirty:
            del self._dirty[line]
            self._memory[line * LINE_BYTES : (line + 1) * LINE_BYTES] = self._lines[line]

    def _evict(self, line: int) -> None:
        self._write_back(line)
        self._lines.pop(line, None)


def memory_of(capacity: int) -> Bytes:
    """Memory for views: zeros, at least `capacity` bytes, whole lines."""
    return np.zeros(-(-capacity // LINE_BYTES) * LINE_BYTES, np.uint8)
