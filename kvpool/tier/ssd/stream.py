"""The data of one group on their way to the disk: cut into spans, each hashed and copied when its turn comes.

Theory. Where everything goes in a group follows from the lengths alone, so it is cut up before a byte is touched, into spans of whole
pages. A span is gathered in a staging buffer, hashed on the way, and written while the next one is gathered: a record passes through the
cache once. What shares pages with the header stays in the header's own buffer, which goes last."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import xxhash

from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Piece
from kvpool.tier.ssd.format import up
from kvpool.units import KIB

SPAN_BYTES: Final = 512 * KIB
"""Of one write, at most. Ten of these stay in the processor's cache between the copy and the write."""


class Part(NamedTuple):
    """Bytes `start..stop` of record number `record` go to byte `at` of the group; `first`: no span before has bytes of it."""

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
            if parts and at >= base + SPAN_BYTES:
                yield Span(base, base + SPAN_BYTES, parts)
                base, parts = base + SPAN_BYTES, []
            count = min(length - done, base + SPAN_BYTES - at)
            parts.append(Part(record, done, done + count, at, first))
            done, first = done + count, False
    if parts:
        yield Span(base, up(parts[-1].at + parts[-1].stop - parts[-1].start, PAGE), parts)


class Stream:
    """One group's data being written to `name`, from byte `offset` of it on. They are read until it is `over`."""

    def __init__(self, name: str, offset: int, head: Bytes, places: Sequence[int], data: Sequence[Bytes], deadline_ns: int) -> None:
        """`head`: the header's buffer, which gets what shares its pages."""
        self.deadline_ns = deadline_ns
        self.failure = 0
        """The first errno."""
        self.going = 0
        """Spans that were taken and have not come to an end."""
        self.checksums = [0] * len(data)
        """xxh3_64 of the records, when all spans have been taken."""
        self._name, self._offset, self._data = name, offset, data
        self._spans = list(cut(head.size, places, [one.size for one in data]))[::-1]
        self._hasher = xxhash.xxh3_64()
        head[:] = 0
        begun = {part.record for span in self._spans for part in span.parts if part.first}
        for number, (place, one) in enumerate(zip(places, data, strict=True)):
            if place >= head.size:
                break
            count = min(one.size, head.size - place)
            head[place : place + count] = one[:count]
            if number not in begun:
                self.checksums[number] = xxhash.xxh3_64_intdigest(one.data)

    @property
    def over(self) -> bool:
        """Whether everything is written, or will not be."""
        return not self._spans and not self.going

    def fail(self, failure: int) -> None:
        """No more spans; `failure` is an errno."""
        self.failure = self.failure or failure
        self._spans.clear()

    def take(self, stage: Bytes) -> Piece | None:
        """The next span, gathered in `stage`; None when there is none."""
        if not self._spans:
            return None
        span = self._spans.pop()
        self.going += 1
        end = span.start
        for part in span.parts:
            self._hash(part)
            if part.at > end:
                stage[end - span.start : part.at - span.start] = 0
            end = part.at + part.stop - part.start
            stage[part.at - span.start : end - span.start] = self._data[part.record][part.start : part.stop]
        stage[end - span.start : span.stop - span.start] = 0
        return Piece(self._name, self._offset + span.start, stage[: span.stop - span.start])

    def _hash(self, part: Part) -> None:
        """Small records at once, large ones part by part: parts of a record follow one another."""
        data = self._data[part.record]
        if data.size <= SPAN_BYTES:
            if part.first:
                self.checksums[part.record] = xxhash.xxh3_64_intdigest(data.data)
            return
        if part.first:
            self._hasher.reset()
        self._hasher.update(data[part.start : part.stop].data)
        if part.stop == data.size:
            self.checksums[part.record] = self._hasher.intdigest()
