"""Streams being written, one after the other, several spans at once.

Theory. One thread gathers spans and hands them to the disk. Those under way are as many as the disk is told; two more lie gathered, so
that the disk gets the next the moment one ends. Buffers are used in turn, more of them than the caches hold: a copy into memory that
another processor has just read (to write it out) waits for that one's cache, and takes several times as long.

Nothing happens by itself: whoever waits for something runs the flow till it has come, and meanwhile what is behind it goes out too."""

import errno
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpool.clock import Clock
from kvpool.tier.ssd.disk import Disk, Piece
from kvpool.tier.ssd.lanes import staging
from kvpool.tier.ssd.stream import SPAN_BYTES, Stream

MAX_DEPTH: Final = 8
"""Writes under way."""
STAGES: Final = 128
"""Staging buffers, where several writes are under way."""
_AHEAD: Final = 2
"""Spans that lie gathered."""


class Flow:
    """Writes streams to a disk. By one thread at a time."""

    def __init__(self, disk: Disk, depth: int, clock: Clock) -> None:
        self._depth, self._clock = max(1, min(depth, MAX_DEPTH)), clock
        self._transfers = disk.transfers(self._depth)
        self._stages = staging(STAGES if self._depth > 1 else 1 + _AHEAD, SPAN_BYTES)
        self._free = deque(range(len(self._stages)))
        self._streams: deque[Stream] = deque()
        self._ready: deque[tuple[int, Piece, Stream]] = deque()
        self._going: dict[int, Stream] = {}

    def add(self, stream: Stream) -> None:
        """It goes out behind those before it."""
        self._streams.append(stream)

    def run(self, until: Callable[[], bool]) -> None:
        """Write until that is so, or nothing is left to write."""
        while not until() and self._step():
            pass

    def stop(self) -> None:
        """Begin nothing more, and wait for what is under way."""
        for stream in (*self._streams, *(stream for _, _, stream in self._ready), *self._going.values()):
            stream.fail(errno.ECANCELED)
        self.run(lambda: False)

    def close(self) -> None:
        """Not while it runs."""
        self._transfers.close()

    def _step(self) -> bool:
        """Gather one span or wait for one; False when there is nothing to do."""
        while self._ready and len(self._going) < self._depth:
            self._start(*self._ready.popleft())
        gathered = len(self._ready) < _AHEAD and self._gather()
        if not gathered and not self._going:
            return bool(self._ready)
        for stage, failure in self._transfers.ended(wait=not gathered):
            stream = self._going.pop(stage)
            self._end(stage, stream)
            if failure:
                stream.fail(failure)
        return True

    def _start(self, stage: int, piece: Piece, stream: Stream) -> None:
        if self._clock.now_ns() >= stream.deadline_ns:
            stream.fail(errno.ETIMEDOUT)
        if stream.failure:
            self._end(stage, stream)
            return
        self._transfers.start(stage, piece, writing=True)
        self._going[stage] = stream

    def _gather(self) -> bool:
        while self._free and self._streams:
            piece = self._streams[0].take(self._stages[self._free[0]])
            if piece is not None:
                self._ready.append((self._free.popleft(), piece, self._streams[0]))
                return True
            self._streams.popleft()
        return False

    def _end(self, stage: int, stream: Stream) -> None:
        self._free.append(stage)
        stream.going -= 1
