"""The data of one group on their way to the disk: cut into spans, each hashed, copied and written by one lane.

Theory. Where everything goes in a group follows from the lengths alone, so it is cut up before a byte is touched: into spans of whole
pages, a megabyte at most, that begin with a record where they can. A lane takes the next span, hashes the records that begin in it, copies
them into its staging buffer and writes that. So hashing and copying run on all processors, while other spans are in flight, and a record
passes through the cache once. What shares pages with the header stays in the header's own buffer, which goes last."""

import errno
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import xxhash

from kvpool.clock import Clock
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.format import up
from kvpool.tier.ssd.lanes import STAGE_BYTES, Lanes, patience


class Part(NamedTuple):
    """Bytes `start..stop` of record number `record` go to byte `at` of the group; the lane that gets them hashes the record if `first`."""

    record: int
    start: int
    stop: int
    at: int
    first: bool


class Span(NamedTuple):
    """Whole pages `start..stop` of a group, and what is in them; the rest is zero."""

    start: int
    stop: int
    parts: list[Part]


def cut(head: int, places: Sequence[int], lengths: Sequence[int]) -> Iterator[Span]:
    """The spans behind a header of `head` bytes, whole pages, for data of these lengths at these rising places of a group."""
    base, parts = head, list[Part]()
    for record, (place, length) in enumerate(zip(places, lengths, strict=True)):
        done = max(0, min(length, head - place))
        first = True
        while done < length:
            at = place + done
            whole = at % PAGE == 0 and first and at + length - done > base + STAGE_BYTES
            if parts and (whole or at >= base + STAGE_BYTES):
                end = at if whole else base + STAGE_BYTES
                yield Span(base, end, parts)
                base, parts = end, []
            count = min(length - done, base + STAGE_BYTES - at)
            parts.append(Part(record, done, done + count, at, first))
            done, first = done + count, False
    if parts:
        yield Span(base, up(parts[-1].at + parts[-1].stop - parts[-1].start, PAGE), parts)


class Stream:
    """One group's data being written to `name`, from byte `offset` of it on. They are read until `wait` returns."""

    def __init__(
        self, disk: Disk, lanes: Lanes, clock: Clock, name: str, offset: int, head: Bytes, places: Sequence[int], data: Sequence[Bytes]
    ) -> None:
        """Begin. `head`: the header's buffer, which gets what shares its pages."""
        self._disk, self._lanes, self._clock, self._name, self._offset = disk, lanes, clock, name, offset
        self._data = data
        self.checksums = [0] * len(data)
        """xxh3_64 of the records, when `wait` has answered 0."""
        self._spans = list(cut(head.size, places, [one.size for one in data]))
        self._running: list[Future[int]] = []
        head[:] = 0
        begun = {part.record for span in self._spans for part in span.parts if part.first}
        for number, (place, one) in enumerate(zip(places, data, strict=True)):
            if place >= head.size:
                break
            count = min(one.size, head.size - place)
            head[place : place + count] = one[:count]
            if number not in begun:
                self.checksums[number] = xxhash.xxh3_64_intdigest(one.data)

    def begin(self, deadline_ns: int) -> None:
        """Send the data off in lanes."""
        todo = iter(self._spans)  # next() of it is atomic
        lanes = min(max(1, self._lanes.count), len(self._spans))
        self._running = [self._lanes.start(lambda: self._run(todo, deadline_ns)) for _ in range(lanes)]

    def wait(self) -> int:
        """When all transfers have ended: the first errno."""
        codes = [future.result() for future in self._running]
        return next((code for code in codes if code), 0)

    def _run(self, todo: Iterator[Span], deadline_ns: int) -> int:
        """One lane: spans until there are none left, one fails, or time is over."""
        stage = self._lanes.take(patience(self._clock, deadline_ns))
        if stage is None:
            return errno.ETIMEDOUT
        try:
            for span in todo:
                if self._clock.now_ns() >= deadline_ns:
                    return errno.ETIMEDOUT
                failure = self._write(span, stage)
                if failure:
                    return failure
        finally:
            self._lanes.give(stage)
        return 0

    def _write(self, span: Span, stage: Bytes) -> int:
        end = span.start
        for record, start, stop, at, first in span.parts:
            data = self._data[record]
            if first:
                self.checksums[record] = xxhash.xxh3_64_intdigest(data.data)
            if at > end:
                stage[end - span.start : at - span.start] = 0
            end = at + stop - start
            stage[at - span.start : end - span.start] = data[start:stop]
        stage[end - span.start : span.stop - span.start] = 0
        return self._disk.write([Piece(self._name, self._offset + span.start, stage[: span.stop - span.start])])[0]
