"""The cell of one reading process: what it holds, and what it has used. The owner of the board maps it to look.

Words of 8 bytes in the host's byte order, in sealed memory of its own:

    word    field
       0    magic "KVPCELLS"
       1    format (1)
       2    holds: how many at once at most
       3    counters, a power of two, at least 64 times as many
       4    touches: entries of the ring, a power of two
       8    active: holds now; the owner looks no further while it is 0
      16    head: touches ever written
    byte 4096   counters, 2 bytes each: holds of the slots that are `counter` modulo `counters`
    after them  the ring: entry `n` is word `n modulo touches`, slot | low half of its generation << 32

A counter may be shared by several slots of a large board, so one block in a hundred may look held that isn't, for as long as a hold lasts.
That is safe, and it makes looking a matter of one word whatever is held. Two threads that hold the same slot count twice. The ring is
lossy: a reader never waits for the owner, which notices what it has missed.

One cell is for one board: its slot numbers mean nothing on another. And it is one process's: in a forked child it takes nothing and lets
nothing go, for the memory is the parent's.
"""

import os
import struct
import threading
from types import TracebackType
from typing import Final, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError
from kvpool.tier.board.sealed import keeps_its_size, make_memory

MAGIC: Final = b"KVPCELLS"
FORMAT: Final = 1
HEADER_BYTES: Final = 4096
ACTIVE_WORD: Final = 8
HEAD_WORD: Final = 16
MAX_HOLDS: Final = 0xFFFF
"""So that no counter can wrap."""
MAX_COUNTERS: Final = 64 * (MAX_HOLDS + 1)
MAX_TOUCHES: Final = 1 << 20
U64: Final = 1 << 64
_ONE: Final = np.uint16(1)
_HEAD: Final = struct.Struct("8s4Q")

Slots = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


class CellShape(NamedTuple):
    """Sizes of a cell."""

    holds: int
    counters: int
    touches: int

    @property
    def ring_at(self) -> int:
        """Offset of the ring, bytes."""
        return HEADER_BYTES + 2 * self.counters

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cell."""
        return self.ring_at + 8 * self.touches

    def encode(self) -> bytes:
        """The header's first words."""
        return _HEAD.pack(MAGIC, FORMAT, *self)


def shape_of(descriptor: int) -> CellShape:
    """Of a cell that somebody passed on. Raises `ConfigError` when it is none, or may be truncated."""
    nbytes = keeps_its_size(descriptor)
    raw = os.pread(descriptor, _HEAD.size, 0)
    if len(raw) < _HEAD.size or not raw.startswith(MAGIC):
        raise ConfigError("this is no cell: wrong magic")
    _, version, holds, counters, touches = _HEAD.unpack(raw)
    if version != FORMAT:
        raise ConfigError(f"cell format {version}, this build reads format {FORMAT}: run the same version on both sides")
    sound = 1 <= holds <= MAX_HOLDS and _is_power(counters, MAX_COUNTERS) and _is_power(touches, MAX_TOUCHES)
    shape = CellShape(holds, counters, touches)
    if not sound or shape.nbytes != nbytes:
        raise ConfigError(f"a cell can't be so: {shape} in {nbytes} bytes")
    return shape


def _is_power(number: int, most: int) -> bool:
    return 4 <= number <= most and number & (number - 1) == 0


class Cell:
    """Made by a reader; its descriptor goes to the board's owner. All calls may come from several threads."""

    def __init__(self, shape: CellShape) -> None:
        """See `create`."""
        self.shape = shape
        self.fd, mapping = make_memory("kvpool-cell", shape.nbytes, only_writer=True)
        mapping[: _HEAD.size] = shape.encode()
        view = memoryview(mapping)
        self._words = view[:HEADER_BYTES].cast("Q")
        self._counters = np.frombuffer(view, np.uint16, shape.counters, HEADER_BYTES)
        self._ring = np.frombuffer(view, np.uint64, shape.touches, shape.ring_at)
        self._ring_words = view[shape.ring_at :].cast("Q")
        self._lock = threading.RLock()  # the garbage collector may end a hold in the midst of a call
        self._active = self._head = 0
        self._closed = False
        self._process = os.getpid()

    @classmethod
    def create(cls, *, holds: int = 1024, touches: int = 8192) -> Self:
        """A cell for up to `holds` blocks held at once, that remembers `touches` uses. Raises `ConfigError`."""
        if not 1 <= holds <= MAX_HOLDS or not 1 <= touches <= MAX_TOUCHES:
            raise ConfigError(f"a cell takes 1 to {MAX_HOLDS} holds and 1 to {MAX_TOUCHES} touches, got {holds} and {touches}")
        return cls(CellShape(holds, 1 << (64 * holds - 1).bit_length(), max(4, 1 << (touches - 1).bit_length())))

    @property
    def active(self) -> int:
        """Holds now."""
        return self._active

    def hold(self, slots: Slots) -> "Hold | None":
        """Say that these slots are looked at; None when there is no room for so many. Seen by all on return (a full fence).

        The caller looks at their generations afterwards, as `BoardReader.hold` does.
        """
        if os.getpid() != self._process:
            return None
        counters = slots & (self.shape.counters - 1)
        with self._lock:  # its release is the fence
            if self._closed or self._active + counters.size > self.shape.holds:
                return None
            np.add.at(self._counters, counters, _ONE)
            self._active += counters.size
            self._words[ACTIVE_WORD] = self._active
        return Hold(self, counters)

    def let_go(self, counters: Slots) -> None:
        """The end of a hold; `Hold.release` calls it once."""
        if os.getpid() != self._process:
            return
        with self._lock:
            np.subtract.at(self._counters, counters, _ONE)
            self._active -= counters.size
            self._words[ACTIVE_WORD] = self._active

    def touch(self, entries: Words) -> None:
        """Append to the ring, the newest last; of more than it takes, the last."""
        if os.getpid() != self._process:
            return
        with self._lock:
            size = self.shape.touches
            skipped = max(0, entries.size - size)
            entries = entries[skipped:]
            at = (self._head + skipped) % size
            first = min(entries.size, size - at)
            self._ring[at : at + first] = entries[:first]
            self._ring[: entries.size - first] = entries[first:]
            self._head = (self._head + skipped + entries.size) % U64
            self._words[HEAD_WORD] = self._head

    def touch_one(self, entry: int) -> None:
        """`touch` with one entry."""
        words = self._words
        if os.getpid() != self._process:
            return
        with self._lock:
            self._ring_words[self._head % self.shape.touches] = entry
            self._head = (self._head + 1) % U64
            words[HEAD_WORD] = self._head

    def close(self) -> None:
        """Give back the descriptor; twice is fine. Holds that still live count for as long as the owner keeps the cell attached."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.fd)


class Hold:
    """Blocks that stay where they are. Release it: nothing else ends it but the end of the process."""

    __slots__ = ("_cell", "_counters")

    def __init__(self, cell: Cell, counters: Slots) -> None:
        self._cell: Cell | None = cell
        self._counters = counters

    def release(self) -> None:
        """Let them go; twice is fine."""
        cell, self._cell = self._cell, None
        if cell is not None:
            cell.let_go(self._counters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
