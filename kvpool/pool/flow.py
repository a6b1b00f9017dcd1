"""Which blocks are written down to the slower tier, and when. Pure: the node's shell does the writing.

Two modes. *Write-through* queues every committed block at once. *Write-back* waits until a block is among the coldest: those that would
leave next, up to `clean_percent` of the capacity, are kept written down, so that room can be made without waiting. Both look at the
coldest blocks now and then, because a slower tier may have given up a copy since: such a block is written again before it leaves.

Admission `all` wants every block below; the pool then doesn't evict a block that isn't there yet (`PoolState.guard`). `hot` wants only
blocks that were used `hot_uses` times, as far as a frequency sketch can tell; the others may leave unwritten.

A block that the tier refuses is tried again with the next batches, `_TRIES` times in all; then it may leave unwritten, which is counted
(`unwritten`): a tier that is full or failing must never stop the pool. It gets its chance again when the tier has taken something.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.sketch import FrequencySketch
from kvpool.pool.state import PoolState
from kvpool.pool.values import Location
from kvpool.units import MIB

OWNER = "flush"
_TRIES = 3
_SKETCH_WIDTH = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSettings:
    """How blocks flow down. Raises `ConfigError`."""

    write: Literal["through", "back"] = "through"
    admission: Literal["all", "hot"] = "all"
    hot_uses: int = 2
    clean_percent: int = 10
    batch_bytes: int = 16 * MIB
    max_queued: int = 1 << 17

    def __post_init__(self) -> None:
        if self.write not in ("through", "back") or self.admission not in ("all", "hot"):
            raise ConfigError(f"write is 'through' or 'back', admission 'all' or 'hot'; got {self.write!r} and {self.admission!r}")
        if self.hot_uses < 1 or not 1 <= self.clean_percent <= 100 or self.batch_bytes < 1 or self.max_queued < 1:
            raise ConfigError("hot_uses, batch_bytes and max_queued must be positive, clean_percent between 1 and 100")


class Flush(NamedTuple):
    """Blocks to write down now, under a read lease that keeps them in place: where each lies."""

    lease_id: int
    keys: tuple[BlockKey, ...]
    places: tuple[Location, ...]


class TierFlow:
    """The decisions over one pool. `stored(keys)` says of each key whether the slower tier holds it now (from its index, no I/O)."""

    def __init__(self, pool: PoolState, settings: FlowSettings, stored: Callable[[Sequence[BlockKey]], Sequence[bool]]) -> None:
        self._pool = pool
        self._settings = settings
        self._stored = stored
        self._queue: dict[BlockKey, int] = {}  # in order of arrival: tries so far
        self._given_up: dict[BlockKey, None] = {}
        self._uses = FrequencySketch(_SKETCH_WIDTH)
        self._clean_bytes = pool.books().capacity * settings.clean_percent // 100
        self._since_scan_bytes = self._clean_bytes  # committed since the coldest were looked at
        self.counters = dict.fromkeys(("flushed", "flushed_bytes", "unwritten"), 0)

    @property
    def guards(self) -> bool:
        """Whether blocks must wait for being written down before they leave."""
        return self._settings.admission == "all"

    @property
    def queued(self) -> int:
        """Blocks that wait to be written down."""
        return len(self._queue)

    def committed(self, keys: Sequence[BlockKey], nbytes: int) -> None:
        """Blocks of together `nbytes` were published."""
        self._since_scan_bytes += nbytes
        if self._settings.write == "through" and self._settings.admission == "all":
            for key in keys:
                self._enqueue(key)

    def used(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Readers used these blocks; those among them that are hot from now on."""
        hot: list[BlockKey] = []
        for key in keys:
            self._uses.add(key)
            if self._uses.estimate(key) == self._settings.hot_uses:
                hot.append(key)
        if self._settings.admission == "hot" and self._settings.write == "through":
            for key in hot:
                self._enqueue(key)
        return hot

    def hot(self, key: BlockKey) -> bool:
        """Whether the block was used often enough to be worth a better place."""
        return self._uses.estimate(key) >= self._settings.hot_uses

    def next_flush(self, *, pressed: bool, lease_ns: int, now_ns: int) -> Flush | None:
        """What to write down now, None when nothing is due. `pressed`: somebody waits for room."""
        chosen = self._from_queue()
        if not chosen and (pressed or self._since_scan_bytes >= self._clean_bytes // 4):
            self._since_scan_bytes = 0
            self._scan(now_ns)
            chosen = self._from_queue()
        if not chosen:
            return None
        held = self._pool.hold(chosen, owner=OWNER, lease_ns=lease_ns, now_ns=now_ns)
        there = [(key, place) for key, place in zip(chosen, held.found, strict=True) if place is not None]
        if not held.lease_id:
            return None
        return Flush(held.lease_id, tuple(key for key, _ in there), tuple(place for _, place in there))

    def flushed(self, flush: Flush, stored: Sequence[bool], now_ns: int) -> list[BlockKey]:
        """A flush has ended: per block, whether the tier has it (durably) now. Answers what the tier must forget before the next flush.

        That is what was discarded meanwhile, and everything when the lease had ended: the bytes may have been another block's by then.
        """
        alive = self._pool.release(flush.lease_id, now_ns)
        for key, place, ok in zip(flush.keys, flush.places, stored, strict=True):
            tries = self._queue.pop(key, 0) + 1
            if ok and alive:
                self.counters["flushed"] += 1
                self.counters["flushed_bytes"] += place.length
                self._given_up.clear()
                self._pool.mark((key,), dirty=False)
            elif tries < _TRIES:
                self._queue[key] = tries
            else:
                self.counters["unwritten"] += 1
                if len(self._given_up) < self._settings.max_queued:
                    self._given_up[key] = None
                self._pool.mark((key,), dirty=False)
        return [key for key, ok in zip(flush.keys, stored, strict=True) if ok and not (alive and self._pool.locate(key) is not None)]

    def _enqueue(self, key: BlockKey) -> None:
        if len(self._queue) < self._settings.max_queued:
            self._queue.setdefault(key, 0)

    def _from_queue(self) -> list[BlockKey]:
        """The first of the queue that still need writing, a batch at most; they stay queued until `flushed`."""
        chosen: list[BlockKey] = []
        nbytes = 0
        gone: list[BlockKey] = []
        for key in self._queue:
            place = self._pool.locate(key)
            if place is None or self._stored((key,))[0]:
                gone.append(key)
                continue
            chosen.append(key)
            nbytes += place.length
            if nbytes >= self._settings.batch_bytes:
                break
        self._pool.mark(gone, dirty=False)
        for key in gone:
            del self._queue[key]
        return chosen

    def _scan(self, now_ns: int) -> None:
        """Queue the coldest blocks that the tier doesn't hold; the others may leave."""
        coldest = self._pool.coldest(self._clean_bytes, now_ns)
        for key, there in zip(coldest, self._stored(coldest), strict=True):
            wanted = not there and key not in self._given_up and (self._settings.admission == "all" or self.hot(key))
            self._pool.mark((key,), dirty=wanted and self._settings.admission == "all")
            if wanted:
                self._enqueue(key)
