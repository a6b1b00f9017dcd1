"""The owner's look into its readers' cells: who holds what, who used what.

A cell is another process's memory, so whatever it says is bounded here: sizes are those of the attach, numbers are taken modulo them. One
that claims more holds than it has room for is garbage and nobody's promise: its holds count for nothing, and it is counted as broken. A
ring whose head jumped is taken up again at its head.
"""

import mmap
from itertools import count
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError
from kvpool.tier.board.cell import ACTIVE_WORD, HEAD_WORD, HEADER_BYTES, U64, CellShape, Words, shape_of

MAX_CELLS: Final = 4096
_ABSURD: Final = 1 << 40
"""No reader writes so many touches between two looks."""


class AttachedCell:
    """One cell, mapped to read."""

    def __init__(self, descriptor: int) -> None:
        """Raises `ConfigError` when it is no cell, or may be truncated. The descriptor stays the caller's."""
        self.shape: CellShape = shape_of(descriptor)
        try:
            mapping = mmap.mmap(descriptor, self.shape.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise ConfigError(f"can't map a cell: {error.strerror}") from error
        view = memoryview(mapping)
        self._words = view[:HEADER_BYTES].cast("Q")
        self.active = self._words[ACTIVE_WORD : ACTIVE_WORD + 1]
        self.counters = view[HEADER_BYTES : self.shape.ring_at].cast("H")
        self.mask = self.shape.counters - 1
        self._ring: Words = np.frombuffer(view, np.uint64, self.shape.touches, self.shape.ring_at)
        self._tail = self._words[HEAD_WORD]
        self.broken = False

    def is_sound(self) -> bool:
        """Whether what it claims to hold can be."""
        return self.active[0] <= self.shape.holds

    def holding(self) -> int:
        """Holds now."""
        active = self.active[0]
        return active if active <= self.shape.holds else 0

    def drain(self, limit: int) -> tuple[Words, int]:
        """Up to `limit` entries of the ring, oldest first, and how many were lost before them."""
        size, head = self.shape.touches, self._words[HEAD_WORD]
        behind, lost = (head - self._tail) % U64, 0
        if behind > _ABSURD:
            self._tail, behind, lost = head, 0, size
        elif behind > size:
            lost = behind - size
            self._tail, behind = (head - size) % U64, size
        taken = min(behind, limit)
        places = np.arange(self._tail % size, self._tail % size + taken) & (size - 1)
        self._tail = (self._tail + taken) % U64
        return self._ring[places], lost


class Cells:
    """All cells of a board, by number."""

    def __init__(self) -> None:
        self._cells: dict[int, AttachedCell] = {}
        self._numbers = count(1)
        self._sight: tuple[tuple[memoryview, memoryview, int, AttachedCell], ...] = ()
        self.broken = 0

    def attach(self, descriptor: int) -> int:
        """See `Board.attach`."""
        if len(self._cells) >= MAX_CELLS:
            raise ConfigError(f"{MAX_CELLS} processes read this board already")
        number = next(self._numbers)
        self._cells[number] = AttachedCell(descriptor)
        self._look_anew()
        return number

    def detach(self, number: int) -> None:
        """See `Board.detach`."""
        self._cells.pop(number, None)
        self._look_anew()

    def clear(self) -> None:
        """Detach all."""
        self._cells.clear()
        self._look_anew()

    def hold(self, slot: int) -> bool:
        """Whether any cell holds this slot."""
        for active, counters, mask, cell in self._sight:
            if active[0] and counters[slot & mask]:
                if cell.is_sound():
                    return True
                self.broken += not cell.broken
                cell.broken = True
        return False

    def watched(self) -> bool:
        """Whether any cell holds anything."""
        return any(active[0] for active, _, _, _ in self._sight)

    def holding(self) -> int:
        """Holds over all cells."""
        return sum(cell.holding() for cell in self._cells.values())

    def drain(self, limit: int) -> tuple[npt.NDArray[np.uint64], int]:
        """Up to `limit` touches of all cells, and how many were lost. Who came first this time comes last the next."""
        parts: list[Words] = []
        lost = 0
        for number in list(self._cells):
            if limit <= 0:
                break
            entries, lost_here = self._cells[number].drain(limit)
            lost += lost_here
            limit -= entries.size
            if entries.size:
                parts.append(entries)
                self._cells[number] = self._cells.pop(number)
        return np.concatenate(parts) if parts else np.empty(0, np.uint64), lost

    def _look_anew(self) -> None:
        self._sight = tuple((cell.active, cell.counters, cell.mask, cell) for cell in self._cells.values())
