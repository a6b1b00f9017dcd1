"""A keyed tier over any region of memory: this process's, a GPU's, or one shared with other hosts.

Theory. The tier keeps an index in memory, asks a `Space` for offsets and a policy for who leaves, and copies bytes through a `Region`.
It does not evict by itself: when there is no room a put answers False, and the owner asks `coldest` and removes them.

A put goes: claim an offset and a catalogue slot, write the payload, flush it, publish. Only then does the index know the record. The
catalogue is what other hosts read (`kvpool.tier.shared`); a private tier has none.

Two locks. One is held for a whole put, so there is one writer. The other guards index, space and policy, is held for dictionary work only,
and never while payload moves. Readers pin what they read, so inside this process nobody ever reads bytes of another record, and bytes
whose checksum is wrong were damaged in place.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xxhash

from kvpool.block import BlockKey
from kvpool.clock import Clock, MonotonicClock, seconds_left
from kvpool.errors import ClosedError, ConfigError
from kvpool.policy.eviction import EvictionPolicy
from kvpool.tier.contract import COUNTERS, DEFAULT_MAX_OBJECTS, Entry, Record, TierBooks, TierState, TierWatcher, check_record, is_expired
from kvpool.tier.index import Catalog, Held, RecordIndex, Space
from kvpool.tier.pages import Bytes
from kvpool.tier.region import Region

log = logging.getLogger(__name__)


def unix_ms() -> int:
    """Wall clock, unix milliseconds."""
    return time.time_ns() // 1_000_000


class MemoryTier:
    """`Tier` over `region`, whose first `space.capacity_bytes` bytes it uses. Not durable.

    `policy` orders the records for `coldest`; it must be fresh. `wall_ms` says what time it is for `expires_ms`. After the region failed
    a write the tier is read-only for good. Its books also count `io_errors`. Raises `ConfigError` when the space is larger than the region.
    """

    durable = False

    def __init__(
        self,
        region: Region,
        space: Space,
        policy: EvictionPolicy,
        *,
        name: str = "memory",
        max_objects: int = DEFAULT_MAX_OBJECTS,
        catalog: Catalog | None = None,
        clock: Clock | None = None,
        wall_ms: Callable[[], int] = unix_ms,
    ) -> None:
        if space.capacity_bytes > region.capacity:
            raise ConfigError(f"the space has {space.capacity_bytes} bytes, the region only {region.capacity}")
        self.name = name
        self._region, self._clock, self._wall_ms = region, clock or MonotonicClock(), wall_ms
        self._index = RecordIndex(space, policy, max_objects, catalog)
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._counters = dict.fromkeys((*COUNTERS, "io_errors"), 0)
        self._state: TierState = "ok"
        self._reason = ""
        self._closed = False

    def put(self, records: Sequence[Record], deadline_ns: int) -> list[bool]:
        """See `Tier.put`."""
        for record in records:
            check_record(record)
        if not self._writing.acquire(timeout=seconds_left(deadline_ns)):
            with self._lock:
                self._require_open()
                self._counters["refused"] += len(records)
            return [False] * len(records)
        try:
            return [self._put(record, deadline_ns) for record in records]
        finally:
            self._writing.release()

    def get(self, wanted: Sequence[tuple[BlockKey, Bytes]], deadline_ns: int) -> list[bool]:
        """See `Tier.get`."""
        read = [self._get(key, into, deadline_ns) for key, into in wanted]
        hits = [held for held in read if held is not None]
        hits.sort(key=lambda held: -held.entry.depth)  # a policy hears of tails first
        with self._lock:
            self._counters["misses"] += len(read) - len(hits)
            self._counters["hits"] += len(hits)
            self._counters["hit_bytes"] += sum(held.entry.length for held in hits)
            now_ns = self._clock.now_ns()
            for held in hits:
                self._index.touched(held, now_ns)
        return [held is not None for held in read]

    def find(self, keys: Sequence[BlockKey], now_ms: int | None = None) -> list[Entry | None]:
        """See `Tier.find`."""
        with self._lock:
            self._require_open()
            entries = [held.entry if (held := self._index.get(key)) is not None else None for key in keys]
        if now_ms is None:
            return entries
        return [None if entry is None or is_expired(entry.expires_ms, now_ms) else entry for entry in entries]

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.remove`."""
        with self._lock:
            self._require_open()
            dropped = sum(self._drop(key) for key in keys)
            self._counters["removed"] += dropped
        return dropped

    def coldest(self, nbytes: int) -> list[BlockKey]:
        """See `Tier.coldest`. Records being read are passed over: their room is not free at once."""
        with self._lock:
            self._require_open()
            return self._index.coldest(nbytes) if nbytes > 0 else []

    def entries(self) -> Iterator[Entry]:
        """See `Tier.entries`."""
        with self._lock:
            self._require_open()
            return self._index.entries()

    def watch(self, watcher: TierWatcher) -> None:
        """See `Tier.watch`."""
        with self._lock:
            self._require_open()
            self._index.watcher = watcher

    def verify(self, key: BlockKey) -> bool | None:
        """See `Tier.verify`. None also when the region can't be read now."""
        held = self._pin(key)
        if held is None:
            return None
        try:
            return self._read(held, np.empty(held.entry.length, np.uint8))
        finally:
            self._unpin(held)

    def books(self) -> TierBooks:
        """See `Tier.books`."""
        with self._lock:
            self._require_open()
            space = self._index.space
            return TierBooks(
                capacity_bytes=space.capacity_bytes,
                used_bytes=space.capacity_bytes - space.free_bytes,
                objects=len(self._index),
                max_objects=self._index.max_objects,
                state=self._state,
                reason=self._reason,
                counters=dict(self._counters),
            )

    def close(self) -> None:
        """See `Tier.close`. Waits for a put in progress."""
        with self._writing, self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                if self._index.catalog is not None:
                    self._index.catalog.retire()
            except OSError as error:
                log.warning("tier %s: can't retire its catalogue: %s", self.name, error)
            finally:
                self._region.close()

    def _put(self, record: Record, deadline_ns: int) -> bool:
        checksum = xxhash.xxh3_64_intdigest(record.data.data)
        held: Held | None = None
        try:
            with self._lock:
                self._require_open()
                if self._resident(record.key):
                    return True
                if self._admits(record, deadline_ns):
                    held = self._claim(record, checksum)
                if held is None:
                    self._counters["refused"] += 1
                    return False
            self._region.write(held.offset, record.data)
            self._region.flush(held.offset, record.data.size)
            if held.slot is not None and self._index.catalog is not None:
                self._index.catalog.publish(held.slot)
        except OSError as error:
            with self._lock:
                self._counters["refused"] += 1
                self._fail(error)
                if held is not None:
                    self._withdraw(held)
            return False
        with self._lock:
            self._index.insert(held, self._clock.now_ns())
            self._counters["puts"] += 1
            self._counters["put_bytes"] += record.data.size
        return True

    def _resident(self, key: BlockKey) -> bool:
        held = self._index.get(key)
        if held is not None and is_expired(held.entry.expires_ms, self._wall_ms()):
            self._counters["expired"] += self._drop(key)
            held = None
        return held is not None

    def _admits(self, record: Record, deadline_ns: int) -> bool:
        return self._state == "ok" and self._clock.now_ns() < deadline_ns and not is_expired(record.expires_ms, self._wall_ms())

    def _claim(self, record: Record, checksum: int) -> Held | None:
        held = self._index.claim(record, checksum)
        if held is None:
            expired = self._index.drop_expired(self._wall_ms())
            self._counters["expired"] += expired
            held = self._index.claim(record, checksum) if expired else None
        return held

    def _get(self, key: BlockKey, into: Bytes, deadline_ns: int) -> Held | None:
        """The record whose bytes are in `into` now."""
        held = self._pin(key)
        if held is None:
            return None
        try:
            fits = into.size == held.entry.length and self._clock.now_ns() < deadline_ns
            return held if fits and self._alive(held) and self._read(held, into) else None
        finally:
            self._unpin(held)

    def _alive(self, held: Held) -> bool:
        """False for a record that is over; it is dropped."""
        if not is_expired(held.entry.expires_ms, self._wall_ms()):
            return True
        with self._lock:
            self._counters["expired"] += self._drop(held.entry.key, held)
        return False

    def _read(self, held: Held, into: Bytes) -> bool | None:
        """Whether `into` now holds the pinned record's bytes; a corrupt one is dropped. None: the region failed."""
        try:
            self._region.invalidate(held.offset, into.size)
            self._region.read(held.offset, into)
        except OSError as error:
            log.warning("tier %s: can't read %s: %s", self.name, held.entry.key.hex(), error)
            with self._lock:
                self._counters["io_errors"] += 1
            return None
        if xxhash.xxh3_64_intdigest(np.ascontiguousarray(into).data) == held.checksum:
            return True
        with self._lock:
            self._counters["corrupt"] += self._drop(held.entry.key, held)
        log.warning("tier %s: record %s is corrupt, dropped", self.name, held.entry.key.hex())
        return False

    def _pin(self, key: BlockKey) -> Held | None:
        with self._lock:
            self._require_open()
            return self._index.pin(key)

    def _unpin(self, held: Held) -> None:
        with self._lock:
            self._index.unpin(held)

    def _drop(self, key: BlockKey, only: Held | None = None) -> int:
        """1 if it was there. Where withdrawing fails, nothing is written any more, so readers elsewhere stay right. Locked."""
        try:
            return self._index.drop(key, only)
        except OSError as error:
            self._fail(error)
            return 1

    def _withdraw(self, held: Held) -> None:
        try:
            self._index.give_back(held)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        log.warning("tier %s is read-only from now on: %s", self.name, error)
        self._counters["io_errors"] += 1
        self._state, self._reason = "read-only", f"a write failed: {error}"

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"tier {self.name} is closed")
