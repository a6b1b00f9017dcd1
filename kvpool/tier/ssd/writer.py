"""The one who writes: groups of records, tombstones, copies of what is worth keeping, and what a life has to write before its first group.

Theory. Everything that changes the log goes through here, one call at a time. A call splits its records into groups that fit, makes room
when the tail is full, and tells the index after each sync. What fails is said to `Health`; nothing is raised."""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

import numpy as np

from kvpool.block import BlockKey
from kvpool.clock import Clock
from kvpool.tier.contract import Record
from kvpool.tier.ssd.append import MAX_ITEMS, Appender, Started, fitting
from kvpool.tier.ssd.disk import PAGE, Disk
from kvpool.tier.ssd.format import Place, Super, Tombstone, header_bytes, up
from kvpool.tier.ssd.health import Health
from kvpool.tier.ssd.index import Held, LogIndex, Segment
from kvpool.tier.ssd.lanes import Lanes
from kvpool.tier.ssd.reader import Reader, Wanted
from kvpool.tier.ssd.recover import Recovered
from kvpool.tier.ssd.root import NAME, write_super
from kvpool.tier.ssd.segments import Segments
from kvpool.units import MIB

_COPY_BYTES: Final = 8 * MIB
_TOMBSTONES: Final = MAX_ITEMS // 2
_TOMBSTONE_ROOM: Final = up(header_bytes((), _TOMBSTONES), PAGE)
_MAX_ADVANCES: Final = 4


class Writer:
    """Writes to one log. `write` and `flush_tombstones` by one thread at a time; the rest is thread-safe."""

    def __init__(
        self,
        disk: Disk,
        lanes: Lanes,
        index: LogIndex,
        reader: Reader,
        clock: Clock,
        found: Recovered,
        block: Super,
        max_slots: int,
        wall_ms: Callable[[], int],
    ) -> None:
        self.health = Health(clock, reader)
        self._disk, self._index, self._reader, self._clock = disk, index, reader, clock
        self._appender = Appender(disk, lanes, clock, block, wall_ms)
        self._segments = Segments(
            disk, lanes, index, clock, found, segment_bytes=block.segment_bytes, max_slots=max_slots, life=block.incarnation
        )
        self._super: Super | None = block
        self._last = found.last
        self._repairs = list(found.repairs)
        self._pending: dict[BlockKey, Place] = {}
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("groups", "copy_failed", "tombstones"), 0)
        self._prepare()

    @property
    def settled(self) -> bool:
        """Whether all that recovery found is known to be durable."""
        return self._last is None

    def counters(self) -> dict[str, int]:
        """What the writer counts."""
        return {
            **self._segments.counters,
            **self._counts,
            "pending_removals": len(self._pending) + len(self._segments.stale),
            "write_errors": self.health.write_failures,
        }

    def write(self, records: Sequence[Record], deadline_ns: int) -> list[Held]:
        """Store records the index doesn't have, none larger than a segment takes; those that are stored."""
        stored: list[Held] = []
        if self.ready(deadline_ns):
            with self._whole():
                self._write(records, stored, deadline_ns)
        return stored

    def bury(self, dropped: Sequence[Held]) -> None:
        """These were dropped from the index: their tombstones go with the next group."""
        with self._lock:
            for held in dropped:
                self._pending[held.entry.key] = max(held.place, self._pending.get(held.entry.key, held.place))

    def flush_tombstones(self, deadline_ns: int) -> None:
        """Write the tombstones that wait, as far as the device and the deadline allow."""
        while self._pending and self.ready(deadline_ns):
            tombstones = self._some_tombstones(0)
            with self._whole():
                if self._fit([], tombstones, deadline_ns) is None or not self._group([], tombstones, deadline_ns):
                    return

    def ready(self, deadline_ns: int) -> bool:
        """Whether to write now: the device takes writes, or is worth a try again, and the deadline is not over. By the writer only."""
        if not self.health.writable or self._clock.now_ns() >= deadline_ns:
            return False
        if self.health.ailing:
            self.health.probing()
            if self._reader.probe(NAME):
                return False
        return self._prepare()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Nothing of a call is left under way behind it, whatever is raised: its records' memory is the caller's again."""
        try:
            yield
        except BaseException:
            self._appender.stop()
            raise

    def _write(self, records: Sequence[Record], stored: list[Held], deadline_ns: int) -> None:
        todo = list(records)
        going: Started | None = None
        while todo and self._clock.now_ns() < deadline_ns:
            tombstones = self._some_tombstones(0 if going is None else len(going.tombstones))
            count = 0 if going is None else fitting(todo, len(tombstones), self._segments.room() - going.total)
            if not count:
                if going is not None and not self._complete(going, stored, deadline_ns):
                    return
                going = None
                fits = self._fit(todo, tombstones, deadline_ns)
                if fits is None:
                    return
                count = fits
            if not count:
                todo.pop(0)  # too large beside what had to be copied
                continue
            started = self._start(going, todo[:count], tombstones, deadline_ns)
            if going is not None and not self._complete(going, stored, deadline_ns):
                self._appender.abandon(started)
                return
            going, todo = started, todo[count:]
        if going is not None:
            self._complete(going, stored, deadline_ns)

    def _prepare(self) -> bool:
        """Write what must be on the disk before this life writes groups: its number, and the last group again.

        That group may have been read from a cache above the device, its sync cut off by a crash, or failed before it.
        """
        owed = self._super is not None or self._last is not None or bool(self._repairs or self._segments.stale)
        try:
            if self._super is not None:
                write_super(self._disk, self._super)
                self._super = None
        except OSError as error:
            self.health.failed(error.errno or errno.EIO, "can't write the superblock")
            return False
        failure = 0
        tail = self._segments.tail
        if tail is not None and self._last is not None:
            failure = self._appender.write_again(tail.slot, self._last)
            self._last = self._last if failure else None
        while tail is not None and self._repairs and not failure:
            failure = self._appender.rewrite(tail.slot, self._repairs[-1])
            if not failure:
                self._repairs.pop()
        failure = failure or self._segments.erase(wait=False)
        if failure:
            self.health.failed(failure, "can't write what has to be written first")
        elif owed:
            self.health.wrote()
        return not failure

    def _fit(self, records: Sequence[Record], tombstones: Sequence[Tombstone], deadline_ns: int) -> int | None:
        """How many records go into the next group, the log moved on to another segment if need be. None: a failure, and said so."""
        for _ in range(_MAX_ADVANCES):
            count = fitting(records, len(tombstones), self._segments.room())
            if count or (not records and self._segments.room() >= _TOMBSTONE_ROOM):
                return count
            failure = self._segments.advance(self._copy, deadline_ns)
            if failure:
                self.health.failed(failure, "can't begin a segment")
                return None
        return 0

    def _group(self, records: Sequence[Record], tombstones: Sequence[Tombstone], deadline_ns: int) -> bool:
        return self._complete(self._start(None, records, tombstones, deadline_ns), [], deadline_ns)

    def _start(self, going: Started | None, records: Sequence[Record], tombstones: Sequence[Tombstone], deadline_ns: int) -> Started:
        tail = self._segments.tail
        assert tail is not None
        return self._appender.start(tail, 0 if going is None else going.total, records, tombstones, deadline_ns)

    def _complete(self, group: Started, stored: list[Held], deadline_ns: int) -> bool:
        """Wait for a group; when it is durable its records are found from now on."""
        failure, held = self._appender.complete(group, deadline_ns)
        if failure:
            self.health.failed(failure, "a write failed")
            return False
        self.health.wrote()
        for one in held:
            beyond = self._index.insert(one)
            self.bury(beyond)
            self._segments.counters["evicted"] += len(beyond)
        stored += held
        self._counts["groups"] += 1
        self._counts["tombstones"] += len(group.tombstones)
        with self._lock:
            for tomb in group.tombstones:
                if self._pending.get(tomb.key) == tomb.before:
                    del self._pending[tomb.key]
        return True

    def _some_tombstones(self, skip: int) -> list[Tombstone]:
        """The oldest that wait, but for so many that are being written."""
        with self._lock:
            return [Tombstone(key, place) for key, place in islice(self._pending.items(), skip, skip + _TOMBSTONES)]

    def _copy(self, source: Segment, kept: Sequence[Held], tombstones: Sequence[Tombstone], deadline_ns: int) -> int:
        """Append copies to the tail and move the index to them; an errno. What does not fit is left."""
        tail = self._segments.tail
        assert tail is not None
        for start in range(0, len(tombstones), _TOMBSTONES):
            some = tombstones[start : start + _TOMBSTONES]
            if self._segments.room() < up(header_bytes((), len(some)), PAGE):
                return errno.ENOSPC
            failure, _ = self._appender.append(tail, [], some, deadline_ns)
            if failure:
                return failure
        at = 0
        while at < len(kept):
            batch = list(kept[at : at + 1])
            while at + len(batch) < min(len(kept), at + _TOMBSTONES) and sum(held.entry.length for held in batch) < _COPY_BYTES:
                batch.append(kept[at + len(batch)])
            at += len(batch)
            failure = self._copy_some(source, tail, batch, deadline_ns)
            if failure:
                return failure
        return 0

    def _copy_some(self, source: Segment, tail: Segment, batch: Sequence[Held], deadline_ns: int) -> int:
        found = self._fetch(source, batch, deadline_ns)
        if self._clock.now_ns() >= deadline_ns:
            return errno.ETIMEDOUT
        found = found[: fitting([record for _, record in found], 0, self._segments.room())]
        if not found:
            return 0
        until_ns = [held.until_ns for held, _ in found]
        failure, copies = self._appender.append(tail, [record for _, record in found], [], deadline_ns, until_ns)
        if failure:
            return failure
        self.bury([copy for (held, _), copy in zip(found, copies, strict=True) if not self._index.move(held, copy)])
        return 0

    def _fetch(self, source: Segment, batch: Sequence[Held], deadline_ns: int) -> list[tuple[Held, Record]]:
        """Those that can be read and are right; the others leave with their segment."""
        data = [np.empty(held.entry.length, np.uint8) for held in batch]
        wanted = [Wanted(source.slot, held.place.offset, into.size, into) for held, into in zip(batch, data, strict=True)]
        found: list[tuple[Held, Record]] = []
        for held, into, got in zip(batch, data, self._reader.fetch(wanted, deadline_ns), strict=True):
            entry = held.entry
            if got.failure or got.checksum != held.checksum:
                self._counts["copy_failed"] += 1
            else:
                record = Record(entry.key, entry.parent, entry.depth, into, entry.expires_ms, entry.sequence, entry.tenant)
                found.append((held, record))
        return found
