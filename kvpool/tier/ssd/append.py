"""Writing one group: data are hashed and copied into staging buffers and go out in lanes, the header last, then one sync.

Theory. The group's layout follows from the records' lengths, so data can be on their way before all of them are hashed; only the header,
which holds the hashes, has to wait. A group that was given up half way (deadline, a failing device) has no header in the log, or one
whose data don't match, and its room is written again by the next group: the tail moves only after the sync."""

import errno
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

import xxhash

from kvpool.clock import Clock
from kvpool.tier.contract import Record, entry_of
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.format import (
    MAX_HEADER_BYTES,
    Group,
    Place,
    RecordItem,
    SegmentPage,
    Super,
    Tombstone,
    data_align,
    encode_group,
    encode_segment,
    header_bytes,
    item_bytes,
    up,
)
from kvpool.tier.ssd.index import Held, Segment
from kvpool.tier.ssd.lanes import MAX_WAIT_S, STAGE_BYTES, Lanes, aligned, patience
from kvpool.tier.ssd.scan import slot_name
from kvpool.units import MIB

MAX_ITEMS: Final = 512
"""Items in one group."""
GROUP_BYTES: Final = 32 * MIB
"""A group takes no further record once it has so many bytes, so that a long batch is acknowledged in parts."""


def fitting(records: Sequence[Record], tombstones: int, room: int) -> int:
    """How many of the first `records` go into one group of at most `room` bytes, beside so many tombstones."""
    header, end = header_bytes((), tombstones), 0
    for count, record in enumerate(records):
        header += item_bytes(record.tenant)
        grown = up(end, data_align(record.data.size)) + record.data.size
        full = count + tombstones >= MAX_ITEMS or (count and end >= GROUP_BYTES)
        if full or up(header, PAGE) + up(grown, PAGE) > room:
            return count
        end = grown
    return len(records)


class Appender:
    """Writes groups at the tail of a segment. Used by one thread at a time, the writer."""

    def __init__(self, disk: Disk, lanes: Lanes, clock: Clock, block: Super) -> None:
        self.life = block.incarnation
        self._disk, self._lanes, self._clock = disk, lanes, clock
        self._segment_bytes = block.segment_bytes
        self._head = aligned(MAX_HEADER_BYTES + PAGE)
        self._page = aligned(PAGE)

    def append(
        self, segment: Segment, records: Sequence[Record], tombstones: Sequence[Tombstone], deadline_ns: int
    ) -> tuple[int, list[Held]]:
        """Write one group, durably, and move the tail behind it. Returns an errno, ETIMEDOUT for the deadline, and where the records are.

        It must fit: see `fitting`.
        """
        header = header_bytes([record.tenant for record in records], len(tombstones))
        places, end = _places(header, [record.data.size for record in records])
        total = up(end, PAGE)
        stream = _Stream(self._disk, self._lanes, self._clock, slot_name(segment.slot), segment.tail, self._head[: up(header, PAGE)])
        checksums = []
        for record, at in zip(records, places, strict=True):
            checksums.append(xxhash.xxh3_64_intdigest(record.data.data))
            if not stream.put(at, record.data, deadline_ns):
                break
        else:
            items = tuple(map(_item, records, places, checksums))
            raw = encode_group(Group(segment.serial, self.life, segment.tail, total, items, tuple(tombstones)))
            stream.finish(raw, deadline_ns)
            if segment.tail == PAGE:
                self._page[:] = memoryview(encode_segment(SegmentPage(segment.serial, self.life, self._segment_bytes)))
                stream.write(0, self._page)
        failure = stream.wait() or self._disk.sync(slot_name(segment.slot))
        if failure:
            return failure, []
        start = segment.tail
        segment.tail += total
        segment.tombstones += len(tombstones)
        place = [Place(segment.serial, start + at) for at in places]
        return 0, [Held(entry_of(r), where, checksum) for r, where, checksum in zip(records, place, checksums, strict=True)]

    def write_again(self, slot: int, group: Group) -> int:
        """Write a group's bytes where they are, durably, whether they were before or not; an errno."""
        stage = self._lanes.take(MAX_WAIT_S)
        if stage is None:
            return errno.ETIMEDOUT
        try:
            for start in range(group.offset, group.offset + group.total, STAGE_BYTES):
                piece = Piece(slot_name(slot), start, stage[: min(STAGE_BYTES, group.offset + group.total - start)])
                failure = self._disk.read([piece])[0] or self._disk.write([piece])[0]
                if failure:
                    return failure
        finally:
            self._lanes.give(stage)
        return self._disk.sync(slot_name(slot))

    def rewrite(self, slot: int, group: Group) -> int:
        """Put a shorter header in the place of a group's header, durably; an errno."""
        raw = encode_group(group)
        head = self._head[: up(len(raw), PAGE)]
        failure = self._disk.read([Piece(slot_name(slot), group.offset, head)])[0]
        if failure:
            return failure
        head[: len(raw)] = memoryview(raw)
        return self._disk.write([Piece(slot_name(slot), group.offset, head)])[0] or self._disk.sync(slot_name(slot))


class _Stream:
    """The bytes of one group on their way: `put` in rising order, `finish`, `wait`. After a failure nothing more is written."""

    def __init__(self, disk: Disk, lanes: Lanes, clock: Clock, name: str, start: int, head: Bytes) -> None:
        self._disk, self._lanes, self._clock, self._name, self._start = disk, lanes, clock, name, start
        self._head = head
        self._head[:] = 0
        self._stage: Bytes | None = None
        self._base = self._at = head.size
        self._running: list[Future[int]] = []
        self._failure = 0

    def put(self, at: int, data: Bytes, deadline_ns: int) -> bool:
        """Copy `data` to byte `at` of the group, writing buffers as they fill up."""
        done = 0
        if at < self._head.size:
            done = min(data.size, self._head.size - at)
            self._head[at : at + done] = data[:done]
            at += done
        while done < data.size:
            stage = self._staged(at, deadline_ns)
            if stage is None:
                return False
            count = min(data.size - done, self._base + STAGE_BYTES - at)
            stage[at - self._base : at - self._base + count] = data[done : done + count]
            done += count
            at = self._at = at + count
            if at == self._base + STAGE_BYTES:
                self._flush(STAGE_BYTES)
        return True

    def finish(self, header: bytes, deadline_ns: int) -> None:
        """Write what is left, and the header."""
        if self._stage is not None:
            size = up(self._at, PAGE) - self._base
            self._stage[self._at - self._base : size] = 0
            self._flush(size)
        if self._failure or self._clock.now_ns() >= deadline_ns:
            self._failure = self._failure or errno.ETIMEDOUT
            return
        self._head[: len(header)] = memoryview(header)
        self.write(self._start, self._head)

    def wait(self) -> int:
        """When all transfers have ended: the first errno."""
        if self._stage is not None:
            self._lanes.give(self._stage)
            self._stage = None
        codes = [future.result() for future in self._running]
        return self._failure or next((code for code in codes if code), 0)

    def _staged(self, at: int, deadline_ns: int) -> Bytes | None:
        """The buffer that takes byte `at`, with zeros in the gap before it; buffers before it are written."""
        while self._stage is not None and at >= self._base + STAGE_BYTES:
            self._stage[self._at - self._base :] = 0
            self._flush(STAGE_BYTES)
        if self._stage is None:
            if self._failure or self._clock.now_ns() >= deadline_ns:
                self._failure = self._failure or errno.ETIMEDOUT
                return None
            self._stage = self._lanes.take(patience(self._clock, deadline_ns))
            if self._stage is None:
                self._failure = errno.ETIMEDOUT
                return None
        self._stage[self._at - self._base : at - self._base] = 0
        return self._stage

    def _flush(self, size: int) -> None:
        """Send the first `size` bytes of the buffer off; the next one goes behind them."""
        stage, offset = self._stage, self._start + self._base
        assert stage is not None
        self._stage = None
        self._base += size
        self._at = max(self._at, self._base)

        def work() -> int:
            try:
                return self._disk.write([Piece(self._name, offset, stage[:size])])[0]
            finally:
                self._lanes.give(stage)

        self._running.append(self._lanes.start(work))

    def write(self, offset: int, data: Bytes) -> None:
        """Write whole pages at `offset` of the file, unless something failed."""
        if self._failure:
            return
        self._running.append(self._lanes.start(lambda: self._disk.write([Piece(self._name, offset, data)])[0]))


def _item(record: Record, at: int, checksum: int) -> RecordItem:
    return RecordItem(
        record.key, record.parent, record.depth, record.data.size, record.expires_ms, record.sequence, record.tenant, at, checksum
    )


def _places(header: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where data start behind a header of so many bytes, from the group's start, and where the last end."""
    places, end = [], header
    for length in lengths:
        start = up(end, data_align(length))
        places.append(start)
        end = start + length
    return places, end
