"""Where the log goes next: free slots, the segment being written, and making room by giving up an old segment.

Theory. The log has a fixed number of slots, files of one size. One slot is kept free, so that records worth keeping can be copied before
the room of an old segment is used again. When the last free slot becomes the tail, a victim is chosen: the segment with the largest dead
share if that is half or more (compaction: all live records are copied), else the oldest (FIFO: records hit since they were written are
copied, up to a quarter of a segment, the others leave). A tombstone in the victim is copied too while an older segment is still on the
disk; in FIFO order there is none.

A slot's first page is erased when it is given up, so what was given up stays so after a crash, and a tombstone for it is not needed. The
first page of the new use, with a new serial, is written and synced with the first group."""

import errno
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from kvpool.clock import Clock
from kvpool.tier.ssd.disk import PAGE, Disk, Piece
from kvpool.tier.ssd.format import SEAL, Group, Tombstone, encode_group
from kvpool.tier.ssd.index import Held, LogIndex, Segment, footprint
from kvpool.tier.ssd.lanes import Lanes, aligned, patience
from kvpool.tier.ssd.recover import Recovered
from kvpool.tier.ssd.scan import scan_segment, slot_name
from kvpool.units import SECOND

log = logging.getLogger(__name__)

KEPT_SHARE: Final = 4
"""Of a FIFO victim at most one part in so many is copied."""
DEAD_SHARE: Final = 2
"""A segment whose dead bytes are at least one part in so many is compacted."""
CREATE_AGAIN_NS: Final = 30 * SECOND
"""After a failure to make a file the log uses those it has for so long."""

Copy = Callable[[Segment, Sequence[Held], Sequence[Tombstone], int], int]
"""(from, records, tombstones, deadline_ns) -> errno: append copies to the tail, durably, and move the index to them."""


class Segments:
    """The slots of one log. Used by one thread at a time, the writer. Errors are errnos, 0 none, as of `Disk`."""

    def __init__(
        self, disk: Disk, lanes: Lanes, index: LogIndex, clock: Clock, found: Recovered, *, segment_bytes: int, max_slots: int, life: int
    ) -> None:
        self.tail = found.tail
        self.segment_bytes, self.max_slots, self.life = segment_bytes, max_slots, life
        self.counters = dict.fromkeys(("segments_reclaimed", "segments_compacted", "evicted", "reinserted", "create_failed"), 0)
        self._disk, self._index, self._clock = disk, index, clock
        self._free, self._slots, self._serial = list(found.free), set(found.slots), found.serial
        self.stale: list[int] = []
        """Free slots whose first page is still to be erased."""
        self._create_after_ns = 0
        self._page, self._zeros = aligned(PAGE), aligned(PAGE)
        self._lanes = lanes
        self._erasing: Future[int] | None = None

    def room(self) -> int:
        """Bytes left in the tail; one page is kept for the mark that ends a segment."""
        return 0 if self.tail is None or self.tail.sealed else self.segment_bytes - PAGE - self.tail.tail

    def advance(self, copy: Copy, deadline_ns: int) -> int:
        """Begin a new tail, and give up an old segment if that took the last slot. ETIMEDOUT: not within the deadline."""
        failure = self.erase(wait=True) or self._make_free(copy, deadline_ns) or self.erase(wait=True)
        if failure:
            return failure
        self._seal()
        self._serial += 1
        self.tail = Segment(self._free.pop(), self._serial)
        self._index.add_segment(self.tail)
        if not self._free and len(self._slots) >= self.max_slots:
            return self._reclaim(copy, deadline_ns)
        return 0

    def _make_free(self, copy: Copy, deadline_ns: int) -> int:
        """See that there is a free slot: one there is, a new one, or an old segment's."""
        if self._free:
            return 0
        failure = errno.ENOSPC
        if len(self._slots) < self.max_slots and self._clock.now_ns() >= self._create_after_ns:
            failure = self._create()
            if not failure:
                return 0
        if len(self._index.segments) < 2:
            return failure
        return self._reclaim(copy, deadline_ns)

    def _create(self) -> int:
        slot = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        try:
            self._disk.create(slot_name(slot), self.segment_bytes)
            self._disk.sync_directory()
        except OSError as error:
            self._create_after_ns = self._clock.now_ns() + CREATE_AGAIN_NS
            self.counters["create_failed"] += 1
            log.warning("ssd: can't make %s: %s; the log has %d segments", slot_name(slot), error, len(self._slots))
            if isinstance(error, FileExistsError):
                self._slots.add(slot)
            return error.errno or errno.EIO
        self._slots.add(slot)
        self._free.append(slot)
        return 0

    def _seal(self) -> None:
        """Mark the end of the tail, so that recovery need not search behind it. Only a help: it is not synced and may fail."""
        tail = self.tail
        if tail is None or tail.sealed:
            return
        tail.sealed = True
        self._page[:] = 0
        header = encode_group(Group(tail.serial, self.life, tail.tail, PAGE, flags=SEAL))
        self._page[: len(header)] = memoryview(header)
        failure = self._disk.write([Piece(slot_name(tail.slot), tail.tail, self._page)])[0]
        if failure:
            log.warning("ssd: can't mark the end of %s: errno %d", slot_name(tail.slot), failure)
        else:
            tail.tail += PAGE

    def _reclaim(self, copy: Copy, deadline_ns: int) -> int:
        """Give up one segment other than the tail; its slot is free then."""
        others = [segment for segment in self._index.segments.values() if segment is not self.tail]
        if not others:
            return errno.ENOSPC
        victim = max(others, key=_dead_bytes)
        written = victim.tail - PAGE
        compact = _dead_bytes(victim) * DEAD_SHARE >= written and self.room() >= written * 3 // 4  # in a full tail copies find no room
        if not compact:
            victim = others[0]
        kept = self._worth_keeping(victim, compact=compact)
        tombstones: list[Tombstone] = []
        if victim.tombstones and victim is not others[0]:
            scan = scan_segment(self._disk, victim.slot, self.segment_bytes)
            if scan is None or isinstance(scan, int):
                return scan or errno.EIO
            tombstones = [tomb for group in scan.groups for tomb in group.tombstones if tomb.before.serial >= others[0].serial]
        if kept or tombstones:
            failure = copy(victim, kept, tombstones, deadline_ns)
            if failure:
                return failure
        dropped = self._index.empty(victim, patience(self._clock, deadline_ns))
        if dropped is None:
            return errno.ETIMEDOUT
        self._free.append(victim.slot)
        self.counters["evicted"] += dropped
        self.counters["reinserted"] += len(kept)
        self.counters["segments_compacted" if compact else "segments_reclaimed"] += 1
        self.stale.append(victim.slot)
        self._erasing = self._lanes.start(self._erase)
        return 0

    def erase(self, *, wait: bool) -> int:
        """See that the first pages of slots given up are erased, or being erased when not told to wait; an errno."""
        if self._erasing is not None:
            if not wait and not self._erasing.done():
                return 0
            self._erasing.result()
            self._erasing = None
        return self._erase()  # what failed is tried again

    def _erase(self) -> int:
        while self.stale:
            name = slot_name(self.stale[-1])
            failure = self._disk.write([Piece(name, 0, self._zeros)])[0] or self._disk.sync(name)
            if failure:
                return failure
            self.stale.pop()
        return 0

    def _worth_keeping(self, victim: Segment, *, compact: bool) -> list[Held]:
        """Records to copy: what fits the budget and the room, the youngest first to be taken."""
        budget = min(self.room() - PAGE, self.segment_bytes if compact else self.segment_bytes // KEPT_SHARE)
        kept: list[Held] = []
        for held, hit in reversed(list(self._index.live(victim))):
            need = footprint(held.entry) + (PAGE if held.entry.length >= PAGE else 0)
            if (compact or hit) and need <= budget:
                budget -= need
                kept.append(held)
        return kept[::-1]


def _dead_bytes(segment: Segment) -> int:
    """What copying its records elsewhere would gain: padding counts, too, for records copied together take less of it."""
    return segment.tail - PAGE - segment.live_bytes
