"""What a server needs of a node's index: which frames are there, and that those it sends stay in place meanwhile.

`MemoryIndex` is the in-memory twin; in a node the index is its board (`kvpool.node.tcp_index`).
"""

import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvpool.transport.tcp.wire import KEY_BYTES


class Taken(Protocol):
    """Frames that are held in place."""

    @property
    def statuses(self) -> bytes:
        """One byte for each key that was asked for: 1 where its frame is."""
        ...

    @property
    def places(self) -> Sequence[tuple[int, int]]:
        """(offset, length) in the arena of each frame that is there."""
        ...

    def release(self) -> None:
        """They were sent, or are not wanted any more. Once."""
        ...


class Index(Protocol):
    """Keys are 32 bytes each, joined. Thread-safe."""

    def probe(self, keys: bytes) -> bytes:
        """One byte a key: 1 where its frame is there."""
        ...

    def take(self, keys: bytes, lengths: Sequence[int]) -> Taken:
        """Hold the frames that are there and as long as they should be; that counts as using them."""
        ...


class _Held(NamedTuple):
    owner: "MemoryIndex"
    statuses: bytes
    places: Sequence[tuple[int, int]]

    def release(self) -> None:
        self.owner.let_go(self.places)


class MemoryIndex:
    """`Index` over a dictionary, with `held`: how often each (offset, length) is held."""

    def __init__(self) -> None:
        self.frames: dict[bytes, tuple[int, int]] = {}
        self.held: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def probe(self, keys: bytes) -> bytes:
        """See `Index.probe`."""
        return bytes(key in self.frames for key in _split(keys))

    def take(self, keys: bytes, lengths: Sequence[int]) -> Taken:
        """See `Index.take`."""
        found = [self.frames.get(key) for key in _split(keys)]
        right = [place if place is not None and place[1] == length else None for place, length in zip(found, lengths, strict=True)]
        places = [place for place in right if place is not None]
        with self._lock:
            for place in places:
                self.held[place] = self.held.get(place, 0) + 1
        return _Held(self, bytes(place is not None for place in right), places)

    def let_go(self, places: Sequence[tuple[int, int]]) -> None:
        """End one hold of each."""
        with self._lock:
            for place in places:
                self.held[place] -= 1
                if not self.held[place]:
                    del self.held[place]


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
