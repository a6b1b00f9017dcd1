"""A node's board as the TCP plane's index: frames are found on it and held by the plane's own cell while they are sent."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from kvpool.block import KEY_BYTES
from kvpool.tier.board import BoardReader, Cell, Hold
from kvpool.transport.tcp import Taken

_TRIES: Final = 4
"""Blocks may change between finding and holding; what does so again and again is as good as not there."""


def _nothing() -> None:
    """Nobody used anything."""


class _Frames:
    """`Taken`. The node hears of their use afterwards: the client waits until then."""

    __slots__ = ("_hold", "_touch", "_what", "places", "statuses")

    def __init__(
        self,
        statuses: bytes,
        places: Sequence[tuple[int, int]],
        hold: Hold | None = None,
        touch: Callable[..., None] = _nothing,
        *what: Any,
    ) -> None:
        """`touch(*what)` tells the node."""
        self.statuses, self.places = statuses, places
        self._hold, self._touch, self._what = hold, touch, what

    def release(self) -> None:
        """See `Taken.release`."""
        if self._hold is not None:
            self._hold.release()
            self._touch(*self._what)


class BoardIndex:
    """`Index` over `board`, whose reader has the cell `cell`."""

    def __init__(self, board: BoardReader, cell: Cell) -> None:
        self._board = board
        self._cell = cell

    def probe(self, keys: bytes) -> bytes:
        """See `Index.probe`."""
        return self._board.find(keys, time.monotonic_ns()).present.tobytes()

    def take(self, keys: bytes, lengths: Sequence[int]) -> Taken:
        """See `Index.take`. What can't be held isn't there."""
        count = len(lengths)
        if count == 1:
            return self._take_one(keys, lengths[0])
        left, wanted = np.arange(count), np.array(lengths, np.uint64)
        for _ in range(_TRIES):
            found = self._board.find(keys, time.monotonic_ns())
            right = found.present & (found.lengths == wanted)
            if not right.all():  # holds are for leading blocks: look for the others once more, without those
                left, wanted = left[right], wanted[right]
                keys = b"".join([keys[KEY_BYTES * at : KEY_BYTES * (at + 1)] for at in np.flatnonzero(right).tolist()])
            elif not left.size:
                break
            elif (hold := self._board.hold(found, left.size)) is not None:
                places = list(zip(found.offsets.tolist(), found.lengths.tolist(), strict=True))
                return _Frames(_marked(count, left), places, hold, self._board.touch, found, left.size)
        return _Frames(bytes(count), ())

    def _take_one(self, key: bytes, length: int) -> Taken:
        """The same for one, in a quarter of the time."""
        for _ in range(_TRIES):
            place = self._board.find_one(key, time.monotonic_ns())
            if place is None or place.length != length:
                break
            hold = self._cell.hold(np.array([place.slot]))
            if hold is None:
                break
            if self._board.still(place):
                return _Frames(b"\1", ((place.offset, length),), hold, self._board.touch_one, place)
            hold.release()
        return _Frames(b"\0", ())


def _marked(count: int, left: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> bytes:
    statuses = np.zeros(count, np.uint8)
    statuses[left] = 1
    return statuses.tobytes()
