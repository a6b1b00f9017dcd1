"""What a memory tier knows: its records, where they lie, who leaves first, and which are over. No bytes, no locks, no clock.

Theory. A record is *claimed* (it has room, and a slot where there is a catalogue), then *inserted* (found, ordered), then *dropped*.
Readers pin it by a count. Room goes back when the record was dropped and the last reader has gone, never earlier, so room that is given out
again is read by nobody in this process.

Records with an expiry are also in a heap, soonest first. Dropped ones stay in it until they come up, or until they are the majority and the
heap is built anew, so it never has more than twice as many items as there are records, plus a few.
"""

import heapq
from collections.abc import Iterator
from contextlib import closing
from typing import Final, Protocol

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.eviction import Arrival, EvictionPolicy
from kvpool.tier.contract import NEVER_MS, Entry, Record, TierWatcher, entry_of, is_expired

_HEAP_SLACK: Final = 64


class Space(Protocol):
    """Who lies where: `kvpool.pool.allocator.Allocator` is one."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes there are."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes not allocated."""
        ...

    def allocate(self, length: int) -> int | None:
        """Offset of `length` > 0 bytes that overlap nobody's, None without room."""
        ...

    def free(self, offset: int) -> int:
        """Take them back; returns how many bytes they took."""
        ...


class Catalog(Protocol):
    """Where records are announced to readers outside this process. Every call may raise `OSError`."""

    def claim(self, record: Record, offset: int, checksum: int) -> int | None:
        """A slot for a record whose payload is about to be written at `offset`; not yet to be read. None: no slot is free for it."""
        ...

    def publish(self, slot: int) -> None:
        """The payload is flushed: readers may have it."""
        ...

    def withdraw(self, slot: int) -> None:
        """No reader may begin to read it from now on; returns before the payload's room is used again."""
        ...

    def retire(self) -> None:
        """The owner goes: readers must not expect anything any more."""
        ...


class Held:
    """A record with its room. `readers` pin it; `dead` once it was dropped."""

    __slots__ = ("checksum", "dead", "entry", "offset", "readers", "slot")

    def __init__(self, entry: Entry, offset: int, checksum: int, slot: int | None) -> None:
        self.entry, self.offset, self.checksum, self.slot = entry, offset, checksum, slot
        self.readers, self.dead = 0, False


class RecordIndex:
    """The records of one tier. The caller serialises all calls."""

    def __init__(self, space: Space, policy: EvictionPolicy, max_objects: int, catalog: Catalog | None) -> None:
        """`policy` must be fresh. Raises `ConfigError` for `max_objects` below 1."""
        if max_objects < 1:
            raise ConfigError(f"max_objects must be at least 1, got {max_objects}")
        self.space, self.policy, self.max_objects, self.catalog = space, policy, max_objects, catalog
        self._held: dict[BlockKey, Held] = {}
        self._expiries: list[tuple[int, BlockKey]] = []
        self.watcher: TierWatcher | None = None

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: BlockKey) -> Held | None:
        """The record, None when it is not there."""
        return self._held.get(key)

    def entries(self) -> Iterator[Entry]:
        """All entries as of now."""
        return iter([held.entry for held in self._held.values()])

    def claim(self, record: Record, checksum: int) -> Held | None:
        """Room for a record that is not there; None: there is none. Raises `OSError` of the catalogue."""
        offset = self._room(record.data.size)
        if offset is None:
            return None
        slot = None
        try:
            if self.catalog is not None:
                slot = self.catalog.claim(record, offset, checksum)
                if slot is None:
                    self.space.free(offset)
                    return None
        except OSError:
            self.space.free(offset)
            raise
        return Held(entry_of(record), offset, checksum, slot)

    def insert(self, held: Held, now_ns: int) -> None:
        """The claimed record's bytes are there: it is found from now on."""
        entry = held.entry
        self._held[entry.key] = held
        if self.watcher is not None:
            self.watcher(entry.key, entry)
        self.policy.inserted(Arrival(entry.key, entry.parent, entry.depth, entry.length, entry.sequence), now_ns)
        if entry.expires_ms != NEVER_MS:
            heapq.heappush(self._expiries, (entry.expires_ms, entry.key))
            if len(self._expiries) > 2 * len(self._held) + _HEAP_SLACK:
                self._expiries = [(h.entry.expires_ms, key) for key, h in self._held.items() if h.entry.expires_ms != NEVER_MS]
                heapq.heapify(self._expiries)

    def drop(self, key: BlockKey, only: Held | None = None) -> int:
        """Forget `key` (only if it is still the record `only`); 1 if it was there, else 0. Raises `OSError` of the catalogue afterwards."""
        held = self._held.get(key)
        if held is None or (only is not None and held is not only):
            return 0
        del self._held[key]
        if self.watcher is not None:
            self.watcher(key, None)
        self.policy.removed(key)
        self.give_back(held)
        return 1

    def give_back(self, held: Held) -> None:
        """Withdraw a record and free its room, now or with its last reader. Raises `OSError` of the catalogue afterwards."""
        held.dead = True
        try:
            if held.slot is not None and self.catalog is not None:
                self.catalog.withdraw(held.slot)
        finally:
            if not held.readers:
                self.space.free(held.offset)

    def pin(self, key: BlockKey) -> Held | None:
        """The record, its room kept until `unpin`."""
        held = self._held.get(key)
        if held is not None:
            held.readers += 1
        return held

    def unpin(self, held: Held) -> None:
        """A reader has gone."""
        held.readers -= 1
        if held.dead and not held.readers:
            self.space.free(held.offset)

    def touched(self, held: Held, now_ns: int) -> None:
        """A reader used the record."""
        if not held.dead:
            self.policy.touched(held.entry.key, now_ns)

    def drop_expired(self, now_ms: int) -> int:
        """Drop what is over; returns how many. Raises `OSError` of the catalogue."""
        dropped = 0
        while self._expiries and is_expired(self._expiries[0][0], now_ms):
            _, key = heapq.heappop(self._expiries)
            held = self._held.get(key)
            if held is not None and is_expired(held.entry.expires_ms, now_ms):
                dropped += self.drop(key)
        return dropped

    def coldest(self, nbytes: int) -> list[BlockKey]:
        """Who leaves to free `nbytes` > 0; those being read are passed over, their room is not free at once."""
        found: list[BlockKey] = []
        with closing(self.policy.victims()) as victims:
            for key in victims:
                held = self._held[key]
                if held.readers:
                    continue
                found.append(key)
                nbytes -= held.entry.length
                if nbytes <= 0:
                    break
        return found

    def _room(self, length: int) -> int | None:
        if len(self._held) >= self.max_objects or length > self.space.capacity_bytes:
            return None
        return self.space.allocate(length)
