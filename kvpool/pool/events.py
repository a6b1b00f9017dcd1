"""What a node holds on any of its tiers, and the numbered changes of that. Pure.

Theory. `KvEvents` is told by each tier which blocks came and went. A block is held while any tier holds it, and is reported to be on the
first of these (`request/events.py`): when that changes, the change gets the next number and goes into a ring that keeps the latest.
The ring holds the values, so it can be read up to any number exactly, whatever happened since.

The table of what is held is a list of slots. A block keeps its slot while it is held, so a snapshot can be read in pieces of so many
slots while blocks come and go. A reader (`Watch`) is only a position: the number of the last change it has read, and how many pieces of
the table. It reads the changes first, then a piece as of the same number. So for each piece it has read it knows the blocks at its number:
one that comes later is a change, wherever its slot is, and one in a piece not yet read will be met there.

Nothing is kept for a reader. One that falls behind the ring begins anew.
"""

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.request.events import BELOW, BESIDE, DRAM, MAX_BATCH, EventBatch, Stored

DEFAULT_RING = 1 << 16
"""Changes that a node remembers."""

_GONE = 0
_BITS = {DRAM: 1, BESIDE: 2, BELOW: 4}
_FIRST = (_GONE, DRAM, BESIDE, DRAM, BELOW, DRAM, BESIDE, DRAM)
"""By the bits of the tiers that hold a block: the one it is reported to be on."""


class KvEvents:
    """The table and the ring of one life of a node. `ring`: changes it remembers. Single-threaded."""

    def __init__(self, incarnation: int, ring: int = DEFAULT_RING) -> None:
        if ring < 1:
            raise ConfigError(f"a node must remember at least one change, got {ring}")
        self.incarnation = incarnation
        self.sequence = 0
        """Number of the last change."""
        self._ring: list[Stored] = []
        self._size = ring
        self._slot_of: dict[BlockKey, int] = {}
        self._slots: list[Stored | None] = []
        self._held_by = bytearray()
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def stored(self, tier: int, key: BlockKey, parent: BlockKey | None, depth: int) -> None:
        """The block can be read on `tier` now; it may have been so before."""
        slot = self._slot_of.get(key)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                slot = len(self._slots)
                self._slots.append(None)
                self._held_by.append(0)
            self._slot_of[key] = slot
            self._held_by[slot] = _BITS[tier]
            self._slots[slot] = now = (key, parent, depth, tier)
            self._note(now)
        else:
            self._report(slot, self._held_by[slot] | _BITS[tier])

    def removed(self, tier: int, key: BlockKey) -> None:
        """The block isn't on `tier` any more; it may not have been there."""
        slot = self._slot_of.get(key)
        if slot is None:
            return
        left = self._held_by[slot] & ~_BITS[tier]
        if left:
            self._report(slot, left)
            return
        del self._slot_of[key]
        self._slots[slot] = None
        self._free.append(slot)
        self._note((key, None, 0, _GONE))

    def held(self) -> dict[BlockKey, Stored]:
        """All of it by key. O(n)."""
        return {one[0]: one for one in self._slots if one is not None}

    def watch(self, incarnation: int, sequence: int) -> "Watch":
        """A reader that has all up to `sequence` of the life `incarnation`; 0: it has nothing."""
        known = incarnation == self.incarnation and sequence > 0 and self._remembers(sequence)
        return Watch(self, sequence, None) if known else Watch(self, self.sequence, 0)

    def _report(self, slot: int, held_by: int) -> None:
        self._held_by[slot] = held_by
        before = self._slots[slot]
        assert before is not None, "a block that is held has its slot"
        tier = _FIRST[held_by]
        if tier != before[3]:
            self._slots[slot] = now = (*before[:3], tier)
            self._note(now)

    def _note(self, now: Stored) -> None:
        self.sequence += 1
        if len(self._ring) < self._size:
            self._ring.append(now)
        else:
            self._ring[(self.sequence - 1) % self._size] = now

    def _remembers(self, sequence: int) -> bool:
        """Whether all changes after `sequence` are in the ring."""
        return self.sequence - len(self._ring) <= sequence <= self.sequence

    def _changes(self, after: int, until: int) -> EventBatch:
        start, end = after % self._size, until % self._size
        some = self._ring[start:end] if start < end else self._ring[start:] + self._ring[:end]
        latest = {one[0]: one for one in some}
        return EventBatch(
            incarnation=self.incarnation,
            after=after,
            sequence=until,
            stored=tuple(one for one in latest.values() if one[3] != _GONE),
            removed=tuple(key for key, one in latest.items() if one[3] == _GONE),
        )

    def _piece(self, number: int) -> tuple[Stored, ...]:
        return tuple(one for one in self._slots[(number - 1) * MAX_BATCH : number * MAX_BATCH] if one is not None)


class Watch:
    """A reader's position in `KvEvents`: the last change it has read, and the last part of a snapshot, None with no snapshot under way."""

    __slots__ = ("_events", "part", "sequence")

    def __init__(self, events: KvEvents, sequence: int, part: int | None) -> None:
        self._events, self.sequence, self.part = events, sequence, part

    def next(self) -> EventBatch | None:
        """The next batch, at most `MAX_BATCH` blocks; None when there is nothing new. It counts as read."""
        events = self._events
        if not events._remembers(self.sequence):
            self.sequence, self.part = events.sequence, 0
        if self.sequence < events.sequence and self.part != 0:
            until = min(events.sequence, self.sequence + MAX_BATCH)
            batch = events._changes(self.sequence, until)
            self.sequence = until
            return batch
        if self.part is None:
            return None
        number = self.part + 1
        last = number * MAX_BATCH >= len(events._slots)
        self.sequence = events.sequence
        self.part = None if last else number
        return self._still(events._piece(number), number, last=last)

    def idle(self) -> EventBatch:
        """A batch that says only where the reader is."""
        return self._still((), 0, last=False)

    def _still(self, stored: tuple[Stored, ...], part: int, *, last: bool) -> EventBatch:
        at = self.sequence
        return EventBatch(incarnation=self._events.incarnation, after=at, sequence=at, stored=stored, part=part, last=last)
