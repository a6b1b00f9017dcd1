"""Writing groups: data go out in lanes, the header when their hashes are known, then one sync.

Theory. The group's layout follows from the records' lengths, so data can be on their way before all of them are hashed; only the header,
which holds the hashes, has to wait. A group that was given up half way (deadline, a failing device) has no header in the log, or one
whose data don't match, and its room is written again by the next group: the tail moves only after the sync.

The data of a group may be on their way while the group before it is completed. Its header is written after that, so there is never more
than one group with a header that is not synced."""

import errno
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

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
from kvpool.tier.ssd.index import Held, Segment, last_ns
from kvpool.tier.ssd.lanes import MAX_WAIT_S, STAGE_BYTES, Lanes, aligned
from kvpool.tier.ssd.scan import slot_name
from kvpool.tier.ssd.stream import Stream
from kvpool.units import MIB, MS

MAX_ITEMS: Final = 512
"""Items in one group."""
GROUP_BYTES: Final = 16 * MIB
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


class Started(NamedTuple):
    """A group on its way: `total` bytes at `offset` of `segment`. `places`: where data start in it; `until_ns`: when records are over."""

    segment: Segment
    offset: int
    total: int
    records: Sequence[Record]
    places: Sequence[int]
    until_ns: Sequence[int]
    tombstones: tuple[Tombstone, ...]
    stream: Stream
    head: Bytes


class Appender:
    """Writes groups at the tail of a segment. Used by one thread at a time, the writer."""

    def __init__(self, disk: Disk, lanes: Lanes, clock: Clock, block: Super, wall_ms: Callable[[], int]) -> None:
        self.life = block.incarnation
        self._wall_ms = wall_ms
        self._disk, self._lanes, self._clock = disk, lanes, clock
        self._segment_bytes = block.segment_bytes
        self._heads = [aligned(MAX_HEADER_BYTES + PAGE) for _ in range(2)]  # a group may start while the one before it is completed
        self._page = aligned(PAGE)
        self._under_way: list[Stream] = []

    def append(
        self,
        segment: Segment,
        records: Sequence[Record],
        tombstones: Sequence[Tombstone],
        deadline_ns: int,
        until_ns: Sequence[int] | None = None,
    ) -> tuple[int, list[Held]]:
        """Write one group, durably, and move the tail behind it. Returns an errno, ETIMEDOUT for the deadline, and where the records are.

        It must fit: see `fitting`. `until_ns`: when each record is over at the latest, for copies; it follows from `expires_ms` without.
        """
        return self.complete(self.start(segment, 0, records, tombstones, deadline_ns, until_ns), deadline_ns)

    def start(
        self,
        segment: Segment,
        ahead: int,
        records: Sequence[Record],
        tombstones: Sequence[Tombstone],
        deadline_ns: int,
        until_ns: Sequence[int] | None = None,
    ) -> Started:
        """Send the records' data off, to `ahead` bytes behind the tail, where a group that is not complete yet will end.

        The records' memory is read until the group is complete or abandoned; one of the two must follow, before the next but one starts.
        """
        if until_ns is None:
            now_ns, now_ms = self._clock.now_ns(), self._wall_ms()
            until_ns = [last_ns(record.expires_ms, now_ms, now_ns) for record in records]
        header = header_bytes([record.tenant for record in records], len(tombstones))
        places, end = _places(header, [record.data.size for record in records])
        offset = segment.tail + ahead
        self._heads.reverse()
        head = self._heads[0][: up(header, PAGE)]
        data = [record.data for record in records]
        stream = Stream(self._disk, self._lanes, self._clock, slot_name(segment.slot), offset, head, places, data)
        self._under_way.append(stream)
        stream.begin(deadline_ns)
        return Started(segment, offset, up(end, PAGE), records, places, until_ns, tuple(tombstones), stream, head)

    def complete(self, group: Started, deadline_ns: int) -> tuple[int, list[Held]]:
        """Write the header behind the data, sync, and move the tail behind the group; an errno, and where the records are.

        All groups before it must be complete.
        """
        failure = self._wait(group.stream)
        now_ns = self._clock.now_ns()
        if failure or now_ns >= deadline_ns:
            return failure or errno.ETIMEDOUT, []
        segment, serial = group.segment, group.segment.serial
        held = [
            Held(entry_of(record), Place(serial, group.offset + at), checksum, until)
            for record, at, checksum, until in zip(group.records, group.places, group.stream.checksums, group.until_ns, strict=True)
        ]
        items = tuple(_item(one, group.offset, now_ns) for one in held)
        raw = encode_group(Group(serial, self.life, group.offset, group.total, items, group.tombstones))
        group.head[: len(raw)] = memoryview(raw)
        name = slot_name(segment.slot)
        pieces = [Piece(name, group.offset, group.head)]
        if group.offset == PAGE:
            self._page[:] = memoryview(encode_segment(SegmentPage(serial, self.life, self._segment_bytes)))
            pieces.insert(0, Piece(name, 0, self._page))
        failure = next((code for code in self._disk.write(pieces) if code), 0) or self._disk.sync(name)
        if failure:
            return failure, []
        segment.tail += group.total
        segment.tombstones += len(group.tombstones)
        return 0, held

    def abandon(self, group: Started) -> None:
        """Wait for what is on its way; without a header it is nothing."""
        self._wait(group.stream)

    def stop(self) -> None:
        """The same for all groups: something was raised."""
        while self._under_way:
            self._wait(self._under_way[-1])

    def _wait(self, stream: Stream) -> int:
        failure = stream.wait()
        self._under_way.remove(stream)
        return failure

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
        head = self._heads[0][: up(len(raw), PAGE)]
        failure = self._disk.read([Piece(slot_name(slot), group.offset, head)])[0]
        if failure:
            return failure
        head[: len(raw)] = memoryview(raw)
        return self._disk.write([Piece(slot_name(slot), group.offset, head)])[0] or self._disk.sync(slot_name(slot))


def _item(held: Held, group_offset: int, now_ns: int) -> RecordItem:
    entry = held.entry
    ttl_ms = max(1, -(-(held.until_ns - now_ns) // MS)) if entry.expires_ms else 0
    return RecordItem(
        entry.key, entry.parent, entry.depth, entry.length, entry.expires_ms, entry.sequence, entry.tenant,
        held.place.offset - group_offset, held.checksum, ttl_ms,
    )  # fmt: skip


def _places(header: int, lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where data start behind a header of so many bytes, from the group's start, and where the last end."""
    places, end = [], header
    for length in lengths:
        start = up(end, data_align(length))
        places.append(start)
        end = start + length
    return places, end
