"""What the log knows in memory: where each record lies, what each segment holds, who reads where.

Theory. A record's knowledge is packed into one bytes object beside its key, about 300 bytes in all (see docs/ssd.md); with `max_objects`
that bounds the memory. A segment lists the keys written to it, oldest first, so making room by objects drops the oldest record without a
search, and a segment that is given up names its records without reading them. A listed key may be dead by now: it counts only if the
index still has it in that segment. When most of a list is dead it is made anew, so lists have at most twice as many keys as there are
records, plus a few.

Readers count themselves in at a segment; its room is not written again before the last of them has left. All methods are atomic.
"""

import struct
import threading
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.policy.eviction import NEVER_NS
from kvpool.tier.contract import Entry, TierWatcher
from kvpool.tier.ssd.disk import PAGE
from kvpool.tier.ssd.format import Place, data_align, item_bytes, up
from kvpool.units import MS

_PACKED: Final = struct.Struct("<QIBQQQQQ")
_UNTIL: Final = struct.Struct("<Q")
_HAS_PARENT, _ENDS = 1, 2
_SLACK: Final = 64
MAX_TTL_MS: Final = 1 << 42
"""A longer time to live counts as this one, 139 years."""

_ITEM_BYTES = item_bytes("")


class Held(NamedTuple):
    """A record as the index has it. `checksum`: xxh3_64 of its data at `place`; `until_ns`: monotonic time at which it is over at the
    latest, for a clock on the wall may be set back."""

    entry: Entry
    place: Place
    checksum: int
    until_ns: int = NEVER_NS


class Segment:
    """A piece of the log. `slot`: number of its file; `tail`: where the next group goes, in bytes; `sealed`: none goes any more."""

    __slots__ = ("cursor", "keys", "live", "live_bytes", "readers", "sealed", "serial", "slot", "tail", "tombstones")

    def __init__(self, slot: int, serial: int) -> None:
        self.slot, self.serial, self.tail = slot, serial, PAGE
        self.live, self.live_bytes, self.readers, self.tombstones, self.cursor = 0, 0, 0, 0, 0
        self.sealed = False
        self.keys: list[BlockKey] = []


def footprint(entry: Entry) -> int:
    """Bytes of the log that a record takes, its item in the header included, its share of the header's padding not."""
    return _footprint(entry.length, len(entry.tenant.encode()))


def _footprint(length: int, tenant_bytes: int) -> int:
    return _ITEM_BYTES + tenant_bytes + up(length, data_align(length))


class LogIndex:
    """Records by key, and the segments they lie in."""

    def __init__(self, max_objects: int) -> None:
        self.max_objects = max_objects
        self.segments: dict[int, Segment] = {}  # by serial, oldest first
        self._changed = threading.Condition()
        self._packed: dict[BlockKey, bytes] = {}
        self._hit: set[BlockKey] = set()
        self._watcher: TierWatcher = _nobody

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._packed

    def watch(self, watcher: TierWatcher) -> None:
        """Tell `watcher` what is found from now on, and what is not any more."""
        with self._changed:
            self._watcher = watcher

    def add_segment(self, segment: Segment) -> None:
        """It has the largest serial so far."""
        with self._changed:
            self.segments[segment.serial] = segment

    def insert(self, held: Held) -> list[Held]:
        """The record is found from now on, in place of an older one. Returns the oldest records, dropped because there were too many."""
        with self._changed:
            self._drop(held.entry.key)
            dropped = []
            while len(self._packed) >= self.max_objects:
                dropped.append(self._drop_oldest())
                self._watcher(dropped[-1].entry.key, None)
            self._add(held)
            self._watcher(held.entry.key, held.entry)
            return dropped

    def move(self, old: Held, new: Held) -> bool:
        """The record `old` has a copy `new`; False when `old` is not there any more, so the copy is nobody's."""
        with self._changed:
            if self._where(old.entry.key) != old.place:
                return False
            self._drop(old.entry.key)
            self._add(new)
            return True

    def get(self, key: BlockKey) -> Held | None:
        """The record."""
        with self._changed:
            return self._unpack(key)

    def find(self, keys: Iterable[BlockKey]) -> list[Held | None]:
        """The records, as far as they are there."""
        with self._changed:
            return [self._unpack(key) for key in keys]

    def entries(self) -> Iterator[Entry]:
        """All of them, as of now. The lock is held for a copy of the table only; a record is unpacked when it is asked for."""
        with self._changed:
            packed = self._packed.copy()
        return (_unpack(key, raw).entry for key, raw in packed.items())

    def pin(self, keys: Iterable[BlockKey]) -> list[tuple[Held, Segment] | None]:
        """The records; the room of each stays as it is until `unpin` of its segment."""
        with self._changed:
            return [self._pin(key) for key in keys]

    def unpin(self, segments: Iterable[Segment]) -> None:
        """Readers have gone, once for each segment given."""
        with self._changed:
            for segment in segments:
                segment.readers -= 1
            self._changed.notify_all()

    def hit(self, keys: Iterable[BlockKey]) -> None:
        """Readers used these."""
        with self._changed:
            self._hit.update(key for key in keys if key in self._packed)

    def drop(self, key: BlockKey, only: Place | None = None) -> Held | None:
        """Forget the record (only if it lies at `only`); what it was."""
        with self._changed:
            held = self._unpack(key)
            if held is None or (only is not None and held.place != only):
                return None
            self._drop(key)
            self._watcher(key, None)
            return held

    def live(self, segment: Segment) -> Iterator[tuple[Held, bool]]:
        """Records that lie in the segment now, oldest first, and whether each was hit since it was written there."""
        with self._changed:
            found = [(held, key in self._hit) for key in dict.fromkeys(segment.keys) if (held := self._unpack(key)) is not None]
            there = [one for one in found if one[0].place.serial == segment.serial]
        yield from there

    def empty(self, segment: Segment, timeout: float) -> int | None:
        """Drop what lies in the segment and forget it, once no reader is in it; how many records were dropped.

        None: after `timeout` seconds there still was a reader. The records are gone then, the segment stays.
        """
        with self._changed:
            keys = self._listed(segment)
            for key in keys:
                self._drop(key)
                self._watcher(key, None)
            if not self._changed.wait_for(lambda: segment.readers == 0, timeout):
                return None
            del self.segments[segment.serial]
            return len(keys)

    def used_bytes(self) -> tuple[int, int]:
        """Bytes of the log that are written, and those of them that are dead."""
        with self._changed:
            used = sum(segment.tail for segment in self.segments.values())
            return used, used - sum(segment.live_bytes for segment in self.segments.values())

    def _pin(self, key: BlockKey) -> tuple[Held, Segment] | None:
        held = self._unpack(key)
        if held is None:
            return None
        segment = self.segments[held.place.serial]
        segment.readers += 1
        return held, segment

    def _add(self, held: Held) -> None:
        segment = self.segments[held.place.serial]
        self._packed[held.entry.key] = _pack(held)
        segment.keys.append(held.entry.key)
        segment.live += 1
        segment.live_bytes += footprint(held.entry)

    def _drop(self, key: BlockKey) -> None:
        packed = self._packed.pop(key, None)
        if packed is None:
            return
        self._hit.discard(key)
        serial, _, flags, length, *_ = _PACKED.unpack_from(packed)
        segment = self.segments[serial]
        segment.live -= 1
        segment.live_bytes -= _footprint(length, len(packed) - _before_tenant(flags))
        if len(segment.keys) > 2 * segment.live + _SLACK:
            segment.keys, segment.cursor = self._listed(segment), 0

    def _drop_oldest(self) -> Held:
        for segment in self.segments.values():
            while segment.cursor < len(segment.keys):
                held = self._unpack(segment.keys[segment.cursor])
                segment.cursor += 1
                if held is not None and held.place.serial == segment.serial:
                    self._drop(held.entry.key)
                    return held
        raise AssertionError("an index with records has a segment that lists them")

    def _listed(self, segment: Segment) -> list[BlockKey]:
        """Keys of the records that lie in the segment, each once, oldest first."""
        return [key for key in dict.fromkeys(segment.keys) if (place := self._where(key)) is not None and place.serial == segment.serial]

    def _where(self, key: BlockKey) -> Place | None:
        packed = self._packed.get(key)
        return None if packed is None else Place(*_PACKED.unpack_from(packed)[:2])

    def _unpack(self, key: BlockKey) -> Held | None:
        packed = self._packed.get(key)
        return None if packed is None else _unpack(key, packed)


def _nobody(key: BlockKey, entry: Entry | None) -> None:
    """Nobody watches."""


def last_ns(expires_ms: int, now_ms: int, now_ns: int, ttl_ms: int = MAX_TTL_MS) -> int:
    """Monotonic time at which a record is over that expires at unix time `expires_ms`, and in `ttl_ms` at the latest."""
    return now_ns + min(expires_ms - now_ms, ttl_ms, MAX_TTL_MS) * MS if expires_ms else NEVER_NS


def _pack(held: Held) -> bytes:
    entry = held.entry
    flags = (_HAS_PARENT if entry.parent is not None else 0) | (_ENDS if held.until_ns != NEVER_NS else 0)
    fixed = _PACKED.pack(*held.place, flags, entry.length, entry.depth, entry.expires_ms, entry.sequence, held.checksum)
    until = _UNTIL.pack(held.until_ns) if flags & _ENDS else b""
    return b"".join((fixed, entry.parent or b"", until, entry.tenant.encode()))


def _unpack(key: BlockKey, packed: bytes) -> Held:
    serial, offset, flags, length, depth, expires_ms, sequence, checksum = _PACKED.unpack_from(packed)
    end = _before_tenant(flags)
    parent = BlockKey(packed[_PACKED.size : _PACKED.size + KEY_BYTES]) if flags & _HAS_PARENT else None
    until_ns = _UNTIL.unpack_from(packed, end - _UNTIL.size)[0] if flags & _ENDS else NEVER_NS
    return Held(Entry(key, parent, depth, length, expires_ms, sequence, packed[end:].decode()), Place(serial, offset), checksum, until_ns)


def _before_tenant(flags: int) -> int:
    """Where the tenant begins in a packed record; it is the last."""
    return _PACKED.size + (KEY_BYTES if flags & _HAS_PARENT else 0) + (_UNTIL.size if flags & _ENDS else 0)
