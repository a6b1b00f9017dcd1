"""Whether the next message of a vLLM engine is the next one. Pure.

Theory. Messages are numbered from 0 in each life of an engine, and nothing else tells one life from another. So the latest messages are
remembered by number and checksum (every message holds the time it was made): an old number with the same bytes is the message itself
once more, with other bytes it is another life. And a message whose number goes on from ours proves nothing after a silence; what the
engine replays for the number before it does.
"""

import enum
import zlib
from collections import OrderedDict
from typing import Final

REMEMBERED: Final = 1 << 14
"""Messages; more than can wait in a socket."""

Mark = tuple[int, int]


class Place(enum.Enum):
    """Where a message belongs: it is the next; it came before; some before it are missing; it is of another life."""

    NEXT = "next"
    OLD = "old"
    GAP = "gap"
    OTHER_LIFE = "other life"


class Order:
    """The place in one engine's stream."""

    def __init__(self) -> None:
        self.next = 0
        """Number of the message that is due."""
        self._marks: OrderedDict[int, Mark] = OrderedDict()

    def place(self, sequence: int, payload: bytes) -> Place:
        """Where the message belongs."""
        if sequence >= self.next:
            return Place.NEXT if sequence == self.next else Place.GAP
        return Place.OLD if self._marks.get(sequence) == _mark(payload) else Place.OTHER_LIFE

    def took(self, sequence: int, payload: bytes) -> None:
        """The message was taken in; the one after it is due."""
        self._marks[sequence] = _mark(payload)
        self.next = sequence + 1
        if len(self._marks) > REMEMBERED:
            self._marks.popitem(last=False)

    def begin(self) -> None:
        """Another life, or the same one from the start."""
        self.next = 0
        self._marks.clear()


def _mark(payload: bytes) -> Mark:
    return len(payload), zlib.crc32(payload)
