"""The SSD tier: `Tier` over the log.

Theory. A record is appended with others of its batch as one group, synced, and only then found; so what was acknowledged is on the
device. It leaves in FIFO order with its segment, unless readers used it meanwhile. Reads go through the index to the one place the data
are at, and are checked against the hash kept in the index. One writer at a time; readers and the event loop never wait for it.

A removed record is forgotten at once; its tombstone follows, right away if the writer's place is free and the device takes writes, else
with the next group that is written."""

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvpool.block import BlockKey
from kvpool.clock import Clock, MonotonicClock
from kvpool.errors import ClosedError, ConfigError
from kvpool.policy.eviction import NEVER_NS
from kvpool.tier.contract import COUNTERS, DEFAULT_MAX_OBJECTS, Entry, Record, TierBooks, TierWatcher, check_record, is_expired
from kvpool.tier.memory import unix_ms
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd.disk import PAGE, Disk
from kvpool.tier.ssd.file_disk import FileDisk
from kvpool.tier.ssd.format import MAX_SEGMENT_BYTES, Super, item_bytes
from kvpool.tier.ssd.index import Held, LogIndex
from kvpool.tier.ssd.lanes import Lanes, patience
from kvpool.tier.ssd.reader import Fetched, Reader, Wanted
from kvpool.tier.ssd.recover import recover
from kvpool.tier.ssd.root import check_segment_bytes, read_super
from kvpool.tier.ssd.writer import Writer
from kvpool.units import KIB, MIB, SECOND

log = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 64 * MIB
MIN_SEGMENT_BYTES: Final = 64 * KIB
LANES: Final = 16
_CLOSE_NS: Final = 30 * SECOND
_REMOVE_NS: Final = 10 * SECOND
_MAX_NUMBER: Final = 1 << 63


class SsdTier:
    """A durable tier on one `Disk`. See `SsdTier.open` for a directory. `lanes`: reads under way at once for each call, and threads
    that write; 0: one transfer after the other, all in the caller's thread."""

    name = "ssd"
    durable = True

    def __init__(
        self,
        disk: Disk,
        *,
        capacity_bytes: int,
        incarnation: int,
        segment_bytes: int = SEGMENT_BYTES,
        max_objects: int = DEFAULT_MAX_OBJECTS,
        lanes: int = LANES,
        clock: Clock | None = None,
        wall_ms: Callable[[], int] = unix_ms,
    ) -> None:
        """Recover what is on `disk` and go on with it. Raises `ConfigError`: sizes that can't be, a directory that can't be read."""
        _check_sizes(capacity_bytes, segment_bytes, max_objects)
        self._disk, self._clock, self._wall_ms = disk, clock or MonotonicClock(), wall_ms
        self._lanes = Lanes(lanes)
        self._index = LogIndex(max_objects)
        self._reader = Reader(disk, lanes, self._clock)
        max_slots = capacity_bytes // segment_bytes
        try:
            block = read_super(disk)
            if block is not None:
                check_segment_bytes(block, segment_bytes)
            found = recover(
                disk, self._index, self._lanes, self._reader,
                segment_bytes=segment_bytes, max_slots=max_slots, now_ms=wall_ms(), now_ns=self._clock.now_ns(),
            )  # fmt: skip
        except OSError as error:
            self._reader.close()
            raise ConfigError(f"can't read the SSD log: {error}; check the directory and the device below it") from error
        self.recovery = found.recovery
        """What was found."""
        self.last_incarnation = max(found.life, 0 if block is None else block.incarnation)
        """The largest incarnation this log was ever opened with, 0 for a new one."""
        self.incarnation = max(incarnation, self.last_incarnation + 1)
        """This life's: the one asked for, or one more than the last when that is larger."""
        self._writer = Writer(
            disk, self._lanes, self._index, self._reader, self._clock, found, Super(self.incarnation, segment_bytes), max_slots, wall_ms
        )
        self._capacity, self._max_record = max_slots * segment_bytes, segment_bytes - 4 * PAGE
        self._writing, self._active, self._lock = threading.Lock(), 0, threading.Condition()
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._closed = False
        log.info("ssd: %s", self.recovery)

    @classmethod
    def open(
        cls,
        directory: str | Path,
        *,
        capacity_bytes: int,
        incarnation: int,
        segment_bytes: int = SEGMENT_BYTES,
        max_objects: int = DEFAULT_MAX_OBJECTS,
        lanes: int = LANES,
    ) -> "SsdTier":
        """The log in `directory`, made if there is none. Raises `ConfigError`, also when another process has it open."""
        _check_sizes(capacity_bytes, segment_bytes, max_objects)
        disk = FileDisk(directory)
        if not disk.direct:
            log.warning("ssd: %s refuses O_DIRECT; transfers go through the page cache", directory)
        try:
            return cls(
                disk,
                capacity_bytes=capacity_bytes,
                incarnation=incarnation,
                segment_bytes=segment_bytes,
                max_objects=max_objects,
                lanes=lanes,
            )
        except BaseException:
            disk.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache."""
        return isinstance(self._disk, FileDisk) and self._disk.direct

    @property
    def asynchronous(self) -> bool:
        """Whether the kernel carries out many transfers at once by itself; else threads do."""
        return isinstance(self._disk, FileDisk) and self._disk.asynchronous

    def put(self, records: Sequence[Record], deadline_ns: int) -> list[bool]:
        """See `Tier.put`. One group of records is one sync; a long batch takes several."""
        for record in records:
            _check(record)
        with self._using():
            if not self._writing.acquire(timeout=patience(self._clock, deadline_ns)):
                self._count(refused=len(records))
                return [False] * len(records)
            try:
                return self._put(records, deadline_ns)
            finally:
                self._writing.release()

    def get(self, wanted: Sequence[tuple[BlockKey, Bytes]], deadline_ns: int) -> list[bool]:
        """See `Tier.get`. The deadline is looked at before each transfer; one that has begun is waited for."""
        with self._using():
            pinned = self._index.pin(key for key, _ in wanted)
            try:
                jobs = [
                    (at, *pin, into)
                    for at, (pin, (_, into)) in enumerate(zip(pinned, wanted, strict=True))
                    if pin is not None and pin[0].entry.length == into.size and self._alive(pin[0])
                ]
                wants = [Wanted(segment.slot, held.place.offset, into.size, into) for _, held, segment, into in jobs]
                read = self._reader.fetch(wants, deadline_ns)
                good = [self._is_right(job[1], got) is True for job, got in zip(jobs, read, strict=True)]
            finally:
                self._index.unpin(pin[1] for pin in pinned if pin is not None)
            hits = [job for job, ok in zip(jobs, good, strict=True) if ok]
            self._index.hit(held.entry.key for _, held, _, _ in hits)
            self._count(hits=len(hits), misses=len(wanted) - len(hits), hit_bytes=sum(held.entry.length for _, held, _, _ in hits))
            answers = [False] * len(wanted)
            for job in hits:
                answers[job[0]] = True
            return answers

    def find(self, keys: Sequence[BlockKey], now_ms: int | None = None) -> list[Entry | None]:
        """See `Tier.find`."""
        self._require_open()
        now_ns = NEVER_NS if now_ms is None else self._clock.now_ns()
        return [
            None if held is None or (now_ms is not None and _is_over(held, now_ms, now_ns)) else held.entry
            for held in self._index.find(keys)
        ]

    def remove(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.remove`. Gone after a restart too once the tombstones are written: before this returns, unless the device takes no
        writes now or another writer is busy for long; then with the next group. `pending_removals` counts those not written yet."""
        with self._using():
            dropped = [held for key in keys if (held := self._index.drop(key)) is not None]
            self._writer.bury(dropped)
            self._count(removed=len(dropped))
            if dropped:
                deadline_ns = self._clock.now_ns() + _REMOVE_NS
                if self._writing.acquire(timeout=patience(self._clock, deadline_ns)):
                    try:
                        self._writer.flush_tombstones(deadline_ns)
                    finally:
                        self._writing.release()
            return len(dropped)

    def coldest(self, nbytes: int) -> list[BlockKey]:
        """Empty: the log makes its own room."""
        self._require_open()
        return []

    def entries(self) -> Iterator[Entry]:
        """See `Tier.entries`."""
        self._require_open()
        return self._index.entries()

    def watch(self, watcher: TierWatcher) -> None:
        """See `Tier.watch`. A record copied elsewhere in the log is no change."""
        self._require_open()
        self._index.watch(watcher)

    def verify(self, key: BlockKey) -> bool | None:
        """See `Tier.verify`. None also when it can't be read now."""
        with self._using():
            pin = self._index.pin([key])[0]
            if pin is None:
                return None
            try:
                held, segment = pin
                want = Wanted(segment.slot, held.place.offset, held.entry.length, None)
                return self._is_right(held, self._reader.fetch([want], NEVER_NS)[0])
            finally:
                self._index.unpin([pin[1]])

    def books(self) -> TierBooks:
        """See `Tier.books`. `used_bytes` is what is written of the log; `dead_bytes` among the counters is the part that is no record's."""
        self._require_open()
        used, dead = self._index.used_bytes()
        state, reason = self._writer.health.state()
        with self._lock:
            counters = dict(self._counters)
        counters |= self._writer.counters()
        counters |= {"dead_bytes": dead, "read_errors": self._reader.total_failures, "buffered_io": int(not self.direct)}
        counters["threaded_io"] = int(not self.asynchronous)
        return TierBooks(
            capacity_bytes=self._capacity,
            used_bytes=used,
            objects=len(self._index),
            max_objects=self._index.max_objects,
            state=state,
            reason=reason,
            counters=counters,
        )

    def close(self) -> None:
        """See `Tier.close`. Waits for calls in progress, up to half a minute."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            deadline_ns = self._clock.now_ns() + _CLOSE_NS
            if not self._lock.wait_for(lambda: not self._active, patience(self._clock, deadline_ns)):
                log.error("ssd: a transfer has not ended; closing all the same")
        if self._writing.acquire(timeout=patience(self._clock, deadline_ns)):
            try:
                self._writer.flush_tombstones(deadline_ns)
            finally:
                self._writing.release()
        self._reader.close()
        self._lanes.close()
        self._disk.close()

    def _put(self, records: Sequence[Record], deadline_ns: int) -> list[bool]:
        if not self._writer.settled and not self._writer.ready(deadline_ns):
            self._count(refused=len(records))
            return [False] * len(records)  # not even those that are there: they may not be durable
        now_ms = self._wall_ms()
        todo: dict[BlockKey, Record] = {}
        for record in records:
            held = self._index.get(record.key)
            if held is not None and not self._alive(held):
                held = None
            if held is None and not is_expired(record.expires_ms, now_ms) and record.data.size <= self._max_record:
                todo.setdefault(record.key, record)
        stored = self._writer.write(list(todo.values()), deadline_ns) if todo else []
        answers = [record.key in self._index for record in records]
        self._count(puts=len(stored), put_bytes=sum(held.entry.length for held in stored), refused=answers.count(False))
        return answers

    def _alive(self, held: Held) -> bool:
        """False for a record that is over; it is dropped."""
        if not _is_over(held, self._wall_ms(), self._clock.now_ns()):
            return True
        if self._index.drop(held.entry.key, held.place) is not None:
            self._writer.bury([held])
            self._count(expired=1)
        return False

    def _is_right(self, held: Held, got: Fetched) -> bool | None:
        """Whether a record's data came and are right; one that is corrupt is dropped. None: it could not be read."""
        if got.failure:
            if got.failure != errno.ETIMEDOUT:
                log.warning("ssd: can't read %s: errno %d", held.entry.key.hex(), got.failure)
            return None
        if got.checksum == held.checksum:
            return True
        if self._index.drop(held.entry.key, held.place) is not None:
            self._count(corrupt=1)
            log.warning("ssd: record %s is corrupt, dropped", held.entry.key.hex())
        return False

    def _count(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                self._counters[name] += count

    @contextmanager
    def _using(self) -> Iterator[None]:
        """A call that does I/O: `close` waits for it."""
        with self._lock:
            self._require_open()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                self._lock.notify_all()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("tier ssd is closed")


def _is_over(held: Held, now_ms: int, now_ns: int) -> bool:
    """By the clock on the wall, or by the time that has passed."""
    return is_expired(held.entry.expires_ms, now_ms) or held.until_ns <= now_ns


def _check(record: Record) -> None:
    check_record(record)
    item_bytes(record.tenant)
    if max(record.depth, record.expires_ms, record.sequence) >= _MAX_NUMBER:
        raise ConfigError("depth, expires_ms and sequence of a record must be below 2**63")


def _check_sizes(capacity_bytes: int, segment_bytes: int, max_objects: int) -> None:
    if segment_bytes % PAGE or not MIN_SEGMENT_BYTES <= segment_bytes <= MAX_SEGMENT_BYTES:
        raise ConfigError(
            f"segment_bytes must be a multiple of {PAGE} from {MIN_SEGMENT_BYTES} to {MAX_SEGMENT_BYTES}, got {segment_bytes}"
        )
    if capacity_bytes < 2 * segment_bytes:
        raise ConfigError(
            f"the SSD tier needs room for two segments, {2 * segment_bytes} bytes, got {capacity_bytes}; use smaller segments"
        )
    if max_objects < 1:
        raise ConfigError(f"max_objects must be at least 1, got {max_objects}")
