"""Writing groups: data are hashed and copied into staging buffers and go out in lanes, the header last, then one sync.

Theory. The group's layout follows from the records' lengths, so data can be on their way before all of them are hashed; only the header,
which holds the hashes, has to wait. A group that was given up half way (deadline, a failing device) has no header in the log, or one
whose data don't match, and its room is written again by the next group: the tail moves only after the sync.

The data of a group may be on their way while the group before it is synced. Its header is written after that, so there is never more than
one group with a header that is not synced."""

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

import xxhash

from kvpool.clock import Clock
from kvpool.tier.contract import Record, entry_of
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
GROUP_BYTES: Final = 8 * MIB
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


class Started:
    """A group on its way. `held`: its records as they will be found; `total`: its bytes."""

    __slots__ = ("held", "offset", "segment", "stream", "sync", "tombstones", "total")

    def __init__(
        self, segment: Segment, offset: int, total: int, held: list[Held], tombstones: tuple[Tombstone, ...], stream: Stream
    ) -> None:
        self.segment, self.offset, self.total, self.held, self.tombstones, self.stream = segment, offset, total, held, tombstones, stream
        self.sync: Future[int] | None = None


class Appender:
    """Writes groups at the tail of a segment. Used by one thread at a time, the writer."""

    def __init__(self, disk: Disk, lanes: Lanes, clock: Clock, block: Super, wall_ms: Callable[[], int]) -> None:
        self.life = block.incarnation
        self._wall_ms = wall_ms
        self._disk, self._lanes, self._clock = disk, lanes, clock
        self._segment_bytes = block.segment_bytes
        self._head = aligned(MAX_HEADER_BYTES + PAGE)
        self._page = aligned(PAGE)

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
        group = self.start(segment, 0, records, tombstones, deadline_ns, until_ns)
        failure = self.seal(group, deadline_ns)
        return (failure, []) if failure else self.finish(group)

    def start(
        self,
        segment: Segment,
        ahead: int,
        records: Sequence[Record],
        tombstones: Sequence[Tombstone],
        deadline_ns: int,
        until_ns: Sequence[int] | None = None,
    ) -> "Started":
        """Hash the records and send their data off, to `ahead` bytes behind the tail, where a group that is not synced yet will end.

        The records' memory may be used again after this. Then either `seal` or `abandon` it.
        """
        header = header_bytes([record.tenant for record in records], len(tombstones))
        places, end = _places(header, [record.data.size for record in records])
        offset = segment.tail + ahead
        stream = Stream(self._disk, self._lanes, self._clock, slot_name(segment.slot), offset, self._head[: up(header, PAGE)])
        checksums = []
        for record, at in zip(records, places, strict=True):
            checksums.append(xxhash.xxh3_64_intdigest(record.data.data))
            if not stream.put(at, record.data, deadline_ns):
                break
        if until_ns is None:
            now_ns, now_ms = self._clock.now_ns(), self._wall_ms()
            until_ns = [last_ns(record.expires_ms, now_ms, now_ns) for record in records]
        held = [
            Held(entry_of(record), Place(segment.serial, offset + at), checksum, until)
            for record, at, checksum, until in zip(records, places, checksums, until_ns, strict=False)
        ]
        return Started(segment, offset, up(end, PAGE), held, tuple(tombstones), stream)

    def seal(self, group: "Started", deadline_ns: int) -> int:
        """Write the header too, wait for all of it, and let a sync begin; an errno. All groups before it must be synced."""
        segment = group.segment
        if not group.stream.failed:
            now_ns = self._clock.now_ns()
            items = tuple(_item(held, group.offset, now_ns) for held in group.held)
            raw = encode_group(Group(segment.serial, self.life, group.offset, group.total, items, group.tombstones))
            group.stream.finish(raw, deadline_ns)
            if group.offset == PAGE:
                self._page[:] = memoryview(encode_segment(SegmentPage(segment.serial, self.life, self._segment_bytes)))
                group.stream.write(0, self._page)
        failure = group.stream.wait()
        if not failure:
            group.sync = self._lanes.start(lambda: self._disk.sync(slot_name(segment.slot)))
        return failure

    def abandon(self, group: "Started") -> None:
        """Wait for what is on its way; without a header it is nothing."""
        group.stream.wait()

    def finish(self, group: "Started") -> tuple[int, list[Held]]:
        """Wait for the sync and move the tail behind the group; an errno, and where the records are."""
        assert group.sync is not None
        failure = group.sync.result()
        if failure:
            return failure, []
        group.segment.tail += group.total
        group.segment.tombstones += len(group.tombstones)
        return 0, group.held

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
