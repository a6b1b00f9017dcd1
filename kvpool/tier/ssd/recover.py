"""Bringing the index back from the log alone.

Theory. Headers of all segments are read and checked, several segments at once, and replayed in order of place: a later record of a key
replaces an earlier one, a tombstone drops what lies before it. In the last segment, where a crash may have torn something, the data are
read and checked too. Data in older segments were synced before the next segment began; they are checked when they are first read, and
dropped then if they are wrong. So recovery reads one or two pages a group and at most one segment in full."""

import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.policy.eviction import NEVER_NS
from kvpool.tier.contract import Entry, is_expired
from kvpool.tier.ssd.disk import Disk
from kvpool.tier.ssd.format import Group, Place, RecordItem
from kvpool.tier.ssd.index import Held, LogIndex, Segment, last_ns
from kvpool.tier.ssd.lanes import Lanes
from kvpool.tier.ssd.reader import Reader, Wanted
from kvpool.tier.ssd.scan import Scan, scan_segment, slot_name, slot_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What opening a log found. `records` with `bytes` of data are there again. `torn`: records of the last group of the log whose data had
    not been written when it ended; `corrupt`: other records of the last segment whose data are wrong; `damaged`: group headers that fail
    their checksum; `unreadable`: segments that could not be read; `removed`: records that a tombstone dropped; `expired`: records that
    were over; `surplus`: records beyond the limits. `seconds`: how long it took."""

    records: int = 0
    bytes: int = 0
    torn: int = 0
    corrupt: int = 0
    damaged: int = 0
    unreadable: int = 0
    removed: int = 0
    expired: int = 0
    surplus: int = 0
    seconds: float = 0.0


class Recovered(NamedTuple):
    """A log as found. `tail`: the segment to go on with, if there is one; `last`: its last group, which may not have been synced.

    `repairs`: groups in the tail with records whose data are wrong, without those: their headers must be written again before anything is
    added, for a later recovery won't look at those data. `free`: slots whose files hold nothing; `slots`: all files there; `life`: the
    largest seen in any segment.
    """

    recovery: Recovery
    tail: Segment | None
    last: Group | None
    repairs: list[Group]
    free: list[int]
    slots: set[int]
    serial: int
    life: int


def recover(
    disk: Disk, index: LogIndex, lanes: Lanes, reader: Reader, *, segment_bytes: int, max_slots: int, now_ms: int, now_ns: int
) -> Recovered:
    """Fill the empty `index` from the files. Raises `OSError` when the directory can't be listed."""
    started = time.perf_counter()
    slots, taken = _slots(disk, segment_bytes)
    found = lanes.each(lambda slot: scan_segment(disk, slot, segment_bytes), slots)
    unreadable = sum(isinstance(scan, int) for scan in found)
    scans = sorted((scan for scan in found if isinstance(scan, Scan)), key=lambda scan: (scan.page.serial, scan.page.life))
    newest = {scan.page.serial: scan for scan in scans}
    scans = list(newest.values())
    used = {scan.slot for scan in scans}
    free = [slot for slot, scan in zip(slots, found, strict=True) if slot not in used and not isinstance(scan, int)]
    kept = scans[max(0, len(scans) - (max_slots - unreadable)) :] if unreadable < max_slots else []
    surplus = sum(len(group.records) for scan in scans[: len(scans) - len(kept)] for group in scan.groups)
    gone = [scan.slot for scan in scans[: len(scans) - len(kept)]]
    gone += [free.pop() for _ in range(min(len(free), max(0, len(kept) + len(free) + unreadable - max_slots)))]
    taken |= _remove(disk, gone)
    replay = _Replay(index, reader, now_ms, now_ns)
    for scan in kept:
        replay.segment(scan, check=scan is kept[-1])
    entries = list(index.entries())
    recovery = Recovery(
        records=len(entries),
        bytes=sum(entry.length for entry in entries),
        torn=replay.torn,
        corrupt=replay.corrupt,
        damaged=sum(scan.damaged for scan in scans),
        unreadable=unreadable + sum(scan.failure != 0 for scan in scans),
        removed=replay.removed,
        expired=replay.expired,
        surplus=surplus + replay.surplus,
        seconds=time.perf_counter() - started,
    )
    return Recovered(
        recovery,
        index.segments[kept[-1].page.serial] if kept else None,
        kept[-1].groups[-1] if kept and kept[-1].groups else None,
        replay.repairs,
        free,
        set(slots) - set(gone) | taken,
        max((scan.page.serial for scan in scans), default=0),
        max((life for scan in scans for life in (scan.page.life, *(group.life for group in scan.groups[-1:]))), default=0),
    )


def _slots(disk: Disk, segment_bytes: int) -> tuple[list[int], set[int]]:
    """Slots whose files have the right size, and those whose files have not but can't be removed."""
    sizes = {slot: disk.size(name) for name in disk.names() if (slot := slot_of(name)) is not None}
    good = [slot for slot, size in sizes.items() if size == segment_bytes]
    return good, _remove(disk, [slot for slot, size in sizes.items() if size != segment_bytes])


def _remove(disk: Disk, slots: list[int]) -> set[int]:
    """Remove files the log has no use for (a crash while they were made, or the limit shrank); those that would not go."""
    stuck: set[int] = set()
    for slot in slots:
        try:
            disk.remove(slot_name(slot))
        except OSError as error:
            log.warning("ssd: can't remove %s: %s", slot_name(slot), error)
            stuck.add(slot)
    return stuck


class _Replay:
    def __init__(self, index: LogIndex, reader: Reader, now_ms: int, now_ns: int) -> None:
        self.torn = self.corrupt = self.removed = self.expired = self.surplus = 0
        self.repairs: list[Group] = []
        self._index, self._reader = index, reader
        self._now_ms, self._now_ns = now_ms, now_ns

    def segment(self, scan: Scan, *, check: bool) -> None:
        """Replay one segment; `check`: read its data too."""
        segment = Segment(scan.slot, scan.page.serial)
        segment.tail, segment.sealed = scan.end, scan.sealed
        self._index.add_segment(segment)
        for group in scan.groups:
            wrong = self._wrong(scan.slot, group) if check else [False] * len(group.records)
            if group is scan.groups[-1]:
                self.torn += sum(wrong)
            else:
                self.corrupt += sum(wrong)
            if any(wrong):
                sound = tuple(item for item, bad in zip(group.records, wrong, strict=True) if not bad)
                self.repairs.append(group._replace(records=sound))
            for item, bad in zip(group.records, wrong, strict=True):
                if not bad:
                    self._record(item, Place(group.serial, group.offset + item.at))
            segment.tombstones += len(group.tombstones)
            for tomb in group.tombstones:
                held = self._index.get(tomb.key)
                if held is not None and held.place <= tomb.before:
                    self._index.drop(tomb.key)
                    self.removed += 1

    def _record(self, item: RecordItem, place: Place) -> None:
        if is_expired(item.expires_ms, self._now_ms):
            self._index.drop(item.key)
            self.expired += 1
            return
        entry = Entry(item.key, item.parent, item.depth, item.length, item.expires_ms, item.sequence, item.tenant)
        until_ns = last_ns(item.expires_ms, self._now_ms, self._now_ns, item.ttl_ms)
        self.surplus += len(self._index.insert(Held(entry, place, item.checksum, until_ns)))

    def _wrong(self, slot: int, group: Group) -> list[bool]:
        """Per record whether its data are not what the header says. One that can't be read now is left for its first reader to judge."""

        wanted = [Wanted(slot, group.offset + item.at, item.length, None) for item in group.records]
        found = zip(group.records, self._reader.fetch(wanted, NEVER_NS), strict=True)
        return [not got.failure and got.checksum != item.checksum for item, got in found]
