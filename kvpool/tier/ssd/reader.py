"""Reading the data of records out of their segments, many at once, and hashing them on the way.

Theory. The file is read in whole pages, the caller wants bytes. Where the caller's buffer and the data both start at a page, whole pages go
straight into the buffer; the rest passes through a staging buffer. One thread keeps as many reads under way as it may, and begins new ones
before it looks at those that came, so the device never waits for a copy. Bytes are copied as they come, in any order, and hashed where
the caller will find them, when the record is complete."""

import errno
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import xxhash

from kvpool.clock import Clock
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.format import up
from kvpool.tier.ssd.lanes import aligned, patience, staging
from kvpool.tier.ssd.scan import slot_name
from kvpool.units import KIB

SPAN_BYTES: Final = 256 * KIB
"""Of one read, at most."""
FAILED_AFTER: Final = 8
"""Records in a row that could not be read before the device counts as failed."""
MAX_READERS: Final = 4
"""Calls that read at the same time; others wait for one of them."""


class Wanted(NamedTuple):
    """`length` bytes at `offset` of a slot's file; `into`: where to, None if only their checksum is asked for."""

    slot: int
    offset: int
    length: int
    into: Bytes | None


class Fetched(NamedTuple):
    """`failure`: an errno, ETIMEDOUT for the deadline, 0 when all bytes came; `checksum`: xxh3_64 of them."""

    failure: int
    checksum: int = 0


class Reader:
    """Reads from segments. Thread-safe.
    `failures`: records in a row that could not be read, the last with errno `last_failure`; `total_failures`: all."""

    def __init__(self, disk: Disk, depth: int, clock: Clock) -> None:
        self.failures = 0
        self.total_failures = 0
        self.last_failure = 0
        self._disk, self._depth, self._clock = disk, max(1, depth), clock
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_READERS)
        self._idle: list[_Channel] = []
        self._closed = False

    @property
    def failed(self) -> bool:
        """Whether the device seems to answer no read at all."""
        return self.failures >= FAILED_AFTER

    def fetch(self, wanted: Sequence[Wanted], deadline_ns: int) -> list[Fetched]:
        """Read these, the deadline looked at before each transfer."""
        if not wanted:
            return []
        if not self._places.acquire(timeout=patience(self._clock, deadline_ns)):
            return [Fetched(errno.ETIMEDOUT)] * len(wanted)
        try:
            channel = self._take()
            try:
                found = channel.fetch(wanted, deadline_ns)
            finally:
                self._give(channel)
        finally:
            self._places.release()
        for one in found:
            self._note(one.failure)
        return found

    def probe(self, name: str) -> int:
        """Read the first page of a file to see whether the device answers; an errno. A file that isn't there is no failure."""
        failure = self._disk.read([Piece(name, 0, aligned(PAGE))])[0]
        self._note(failure)
        return 0 if failure == errno.ENOENT else failure

    def close(self) -> None:
        """Give back what the disk was asked for, what is in use when it is done with."""
        with self._lock:
            self._closed = True
            for channel in self._idle:
                channel.close()
            self._idle.clear()

    def _take(self) -> "_Channel":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Channel(self._disk, self._depth, self._clock)

    def _give(self, channel: "_Channel") -> None:
        with self._lock:
            if self._closed:
                channel.close()
            else:
                self._idle.append(channel)

    def _note(self, failure: int) -> None:
        if failure and failure != errno.ETIMEDOUT:
            with self._lock:
                self.failures += 1
                self.last_failure = failure
                self.total_failures += 1
        elif self.failures and not failure:
            self.failures = 0


class _Load:
    """A record on its way. `left`: its bytes that have not come; `going`: reads under way."""

    __slots__ = ("checksum", "failure", "going", "into", "left", "straight", "want")

    def __init__(self, want: Wanted) -> None:
        self.want, self.left, self.going, self.failure, self.checksum = want, want.length, 0, 0, 0
        self.into: Bytes | None = want.into
        into = want.into
        self.straight = into is not None and want.offset % PAGE == 0 and into.ctypes.data % PAGE == 0 and into.flags.c_contiguous

    def spans(self) -> Iterator["_Span"]:
        """What to read for it."""
        offset, done = self.want.offset, 0
        while done < self.want.length:
            lead = (offset + done) % PAGE
            count = min(self.want.length - done, SPAN_BYTES - lead)
            if self.straight and count >= PAGE:
                count -= count % PAGE
            yield _Span(self, offset + done - lead, lead, done, count)
            done += count

    def take(self, span: "_Span", data: Bytes) -> None:
        """Bytes that came; the last ones complete the checksum."""
        if self.into is None:
            self.into = np.empty(self.want.length, np.uint8)
        if not span.straight:
            self.into[span.done : span.done + span.size] = data[span.lead : span.lead + span.size]
        self.left -= span.size
        if not self.left:
            self.checksum = xxhash.xxh3_64_intdigest(np.ascontiguousarray(self.into).data)
            self.into = None


class _Span(NamedTuple):
    """Bytes `done .. done + size` of a record, `lead` bytes behind byte `start` of the file, a page's."""

    load: _Load
    start: int
    lead: int
    done: int
    size: int

    @property
    def straight(self) -> bool:
        """Whether it is read into the caller's buffer."""
        return self.load.straight and self.size % PAGE == 0


class _Channel:
    """What one thread needs to have many reads under way."""

    def __init__(self, disk: Disk, depth: int, clock: Clock) -> None:
        self._depth, self._clock = depth, clock
        self._transfers = disk.transfers(depth)
        self._stages = staging(2 * depth, SPAN_BYTES)  # as many again as are under way may have come and not be looked at
        self._free = deque(range(len(self._stages)))
        self._going: dict[int, tuple[_Span, Bytes]] = {}

    def fetch(self, wanted: Sequence[Wanted], deadline_ns: int) -> list[Fetched]:
        """See `Reader.fetch`."""
        loads = [_Load(want) for want in wanted]
        spans = (span for load in loads for span in load.spans())
        came: list[tuple[int, _Span, Bytes]] = []
        try:
            while True:
                self._begin(spans, deadline_ns)
                for stage, span, data in came:
                    if not span.load.failure:
                        span.load.take(span, data)
                    self._free.append(stage)
                if not self._going:
                    return [Fetched(load.failure, load.checksum) for load in loads]
                came = self._ended()
        finally:
            while self._going:  # something was raised: buffers must not be written to any more
                self._ended()

    def close(self) -> None:
        """Not while it is in use."""
        self._transfers.close()

    def _begin(self, spans: Iterator[_Span], deadline_ns: int) -> None:
        """Begin reads, as many as may be under way."""
        while len(self._going) < self._depth and self._free:
            span = next(spans, None)
            if span is None:
                return
            load = span.load
            if self._clock.now_ns() >= deadline_ns:
                load.failure = load.failure or errno.ETIMEDOUT
            if load.failure:
                continue
            stage = self._free.popleft()
            into = load.want.into
            if span.straight and into is not None:
                data = into[span.done : span.done + span.size]
            else:
                data = self._stages[stage][: up(span.lead + span.size, PAGE)]
            self._transfers.start(stage, Piece(slot_name(load.want.slot), span.start, data), writing=False)
            self._going[stage] = (span, data)

    def _ended(self) -> list[tuple[int, _Span, Bytes]]:
        """Reads that have ended, at least one."""
        came = []
        for stage, failure in self._transfers.ended(wait=True):
            span, data = self._going.pop(stage)
            span.load.failure = span.load.failure or failure
            came.append((stage, span, data))
        return came
