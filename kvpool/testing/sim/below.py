"""The slower tier below the simulated pool: what the node's flusher and promoter do, one step an event.

Theory. `TierFlow` decides what is written down. A flush holds its blocks by a lease, and the tier writes them some time later; a block
that a reader missed and the tier has is fetched: reserved, read into the arena, committed as clean. Each tier call may meet the death of
the process (`Crash`) in its middle. What a durable tier has acknowledged and still lists must be there in the next life, and only right
bytes ever come out.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from xxhash import xxh3_64_intdigest

from kvpool.block import BlockKey
from kvpool.policy.eviction import NEVER_NS
from kvpool.pool import Granted, Reserve
from kvpool.pool.flow import Flush, TierFlow
from kvpool.testing.sim import frames
from kvpool.testing.sim.ground import SPEED, TierClock
from kvpool.testing.sim.judge import Violation
from kvpool.testing.sim.world import BelowDraw
from kvpool.tier.contract import Entry, Record, Tier, is_expired
from kvpool.tier.ssd.tier import SsdTier
from kvpool.units import MS

if TYPE_CHECKING:
    from kvpool.testing.sim.node import Node

NODE = (-1, None)
"""Who calls, when the node itself does."""

_BATCH = 4
_BALLAST_BYTES = 3000


T = TypeVar("T")


class Below:
    """The slower tier of one life of a node. `kept`: what an earlier life's tier must have kept, by key."""

    def __init__(self, node: "Node", draw: BelowDraw, rng: Random, tier: Tier) -> None:
        self.node = node
        self.draw = draw
        self.tier = tier
        self.flow = TierFlow(node.pool, draw.flow, self.stored)
        self.written: dict[BlockKey, None] = {}  # blocks that may leave
        self.refusals: dict[BlockKey, int] = {}
        self.acknowledged: dict[BlockKey, int] = {}  # durable records: when they expire, unix ms
        self.removed: dict[BlockKey, None] = {}
        self._clock = TierClock(node, node.ground.disk)
        self._random = rng.random
        self._fetching: dict[BlockKey, None] = {}
        self._flushing = False
        self._ok = True
        node.pool.guard(self.flow.guards)
        node.loop.after(draw.pump_ns, self._pump)

    def load(self) -> None:
        """Put the world's ballast."""
        for number in range(self.draw.ballast):
            key = BlockKey(sha256(b"ballast %d" % number).digest())
            data = np.frombuffer(frames.make_frame(key, _BALLAST_BYTES, 0), np.uint8)
            self.node.ground.given[key] = {xxh3_64_intdigest(data.data): None}
            if self.tier.put([Record(key, None, 0, data)], self._deadline())[0]:
                self.acknowledged[key] = 0

    def stored(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether the tier lists each key now."""
        listed = [entry is not None for entry in self.tier.find(keys, self.wall_ms())]
        for key, there in zip(keys, listed, strict=True):
            if there:
                self.written[key] = None  # even if it ends sooner there: a tier keeps the first record of a key
        return listed

    def wall_ms(self) -> int:
        """Unix time."""
        return self.node.wall_ns() // MS

    def alive(self) -> bool:
        """Whether this life still goes on."""
        return self.node.up and self.node.below is self

    # What the node tells

    def committed(self, keys: Sequence[BlockKey], nbytes: int, *, clean: bool = False) -> None:
        """Blocks were published."""
        for key in keys:
            self.written.pop(key, None)
            if clean or not self._ok:
                self.written[key] = None  # while the tier is out of order blocks may leave unwritten
        if not clean:
            self.flow.committed(keys, nbytes)

    def missed(self, keys: Sequence[BlockKey]) -> None:
        """Readers wanted these and the pool doesn't have them: fetch what the tier lists."""
        wanted = [key for key in keys if key not in self._fetching]
        now_ms = self.wall_ms()
        entries = [entry for entry in self.tier.find(wanted, now_ms) if entry is not None][:_BATCH]
        for entry in entries:
            if is_expired(entry.expires_ms, now_ms):
                raise Violation(f"{self.node.judge.name(entry.key)} is over, and the tier below offers it")
        if entries and len(self._fetching) < 2 * _BATCH:
            self._fetch(entries)

    def forget(self, key: BlockKey) -> None:
        """A block was found damaged, or isn't wanted: it must not come back from below."""
        there = self.tier.find([key])[0] is not None
        if self._run(lambda: self.tier.remove([key])) is not None:
            self.acknowledged.pop(key, None)
            if there:
                self.removed[key] = None

    def may_leave(self, key: BlockKey) -> bool:
        """Whether evicting the block is no loss: it was written down since its commit, refused often, or the tier is out of order."""
        if not self.flow.guards or not self._ok or key in self.written or self.refusals.get(key, 0) >= 3:
            return True
        self.stored([key])
        return key in self.written

    def complaint(self) -> str:
        """Whether the tier takes a record, as it must in a healed world, though perhaps not at the first try; what it says when not."""
        data = np.zeros(64, np.uint8)
        self.tier.put([Record(BlockKey(bytes(32)), None, 0, data)], self._deadline())
        books = self.tier.books()
        if isinstance(self.tier, SsdTier) and self.tier.recovery.unreadable:
            return ""  # what could not be read when it was opened is left alone for this life, be it all of the log
        return "" if books.state == "ok" else f"{books.state}: {books.reason}"

    # Writing down

    def used(self, keys: Sequence[BlockKey], now_ns: int) -> None:
        """Readers got these: what comes back is admitted."""
        self.node.pool.admit(self.flow.used(keys), now_ns)

    def press(self) -> None:
        """Somebody waits for room."""
        self._flush(pressed=True)

    def _pump(self) -> None:
        if not self.alive():
            self.node.loop.stale()
            return
        self.node.loop.after(max(self.draw.pump_ns, self.node.tick_ns // 10), self._pump)  # at rest, seldom
        if not self._flush(pressed=False):
            self.node.loop.stale()

    def _flush(self, *, pressed: bool) -> bool:
        """Begin a flush unless one is under way; False when there is nothing to do."""
        node = self.node
        if self._flushing:
            return False
        now_ns = node.settle()
        node.judge.caller = NODE
        took_ns = int(self.draw.transfer_ns * (0.5 + self._random()))
        lease_ns = 4 * self.draw.transfer_ns
        flush = self.flow.next_flush(pressed=pressed, lease_ns=lease_ns, now_ns=now_ns)
        if flush is None:
            return False
        node.judge.held(flush.keys, flush.places, flush.lease_id, lease_ns, now_ns)
        self._flushing = True
        node.loop.after(took_ns, self._flushed, flush)
        return True

    def _flushed(self, flush: Flush) -> None:
        node = self.node
        if not self.alive():
            node.loop.stale()
            return
        self._flushing = False
        now_ns = node.settle()
        records = [self._record(key, place.offset, place.length, now_ns) for key, place in zip(flush.keys, flush.places, strict=True)]
        for record in records:
            self.removed.pop(record.key, None)  # were it to die now, it might be there
            node.ground.given.setdefault(record.key, {})[xxh3_64_intdigest(record.data.data)] = None
        over = flush.lease_id not in node.judge.truth.leases
        if over:  # the bytes may be another's by now
            node.coverage.hit("flush outlived its lease")
        stored = self._run(lambda: self.tier.put(records, self._deadline()))
        if stored is None:
            return
        if node.note is not None:
            node.note("below", "write", (flush.keys,), tuple(stored))
        for record, ok in zip(records, stored, strict=True):
            if ok and not over:
                self.written[record.key] = None
                self.acknowledged[record.key] = record.expires_ms
                node.coverage.hit("block written down")
            else:
                self.refusals[record.key] = self.refusals.get(record.key, 0) + 1
                node.coverage.hit("tier below refused a block")
                self._make_room(record.data.size)
        node.judge.let_go(flush.lease_id, now_ns)
        for key in self.flow.flushed(flush, stored, now_ns):
            self.forget(key)
        if self.alive():
            self._look_at_tier()
            node.judge.after(node.pool, now_ns)

    def _make_room(self, nbytes: int) -> None:
        """A tier that doesn't evict by itself is told to, half of the time."""
        if self._random() < 0.5 and (coldest := self.tier.coldest(nbytes)):
            self._run(lambda: self.tier.remove(coldest))
            for key in coldest:
                self.acknowledged.pop(key, None)

    def _record(self, key: BlockKey, offset: int, length: int, now_ns: int) -> Record:
        data = np.frombuffer(self.node.arena.view, np.uint8, length, offset)
        view = self.node.pool.view(key)
        if view is None:
            return Record(key, None, 0, data, expires_ms=1)
        left_ns = view.expires_ns - now_ns
        expires_ms = 0 if view.expires_ns == NEVER_NS else max(1, self.wall_ms() + left_ns // MS)
        return Record(key, view.parent, view.depth, data, expires_ms, view.sequence, view.tenant)

    def _look_at_tier(self) -> None:
        ok = self.tier.books().state == "ok"
        if ok != self._ok:
            self._ok = ok
            self.node.pool.guard(ok and self.flow.guards)
            self.written.update(dict.fromkeys(self.node.judge.truth.committed))
            self.node.coverage.hit("tier below came back" if ok else "tier below out of order")

    # Fetching

    def _fetch(self, entries: Sequence[Entry]) -> None:
        node = self.node
        now_ns = node.settle()
        items = [self._item(entry) for entry in entries]
        lease_ns = 4 * self.draw.transfer_ns
        node.judge.caller = NODE
        answer = node.room_for("promotion", lease_ns, items, now_ns)
        granted = [(item, grant.offset) for item, grant in zip(items, answer.grants, strict=True) if isinstance(grant, Granted)]
        if granted:
            self._fetching.update(dict.fromkeys(item.key for item, _ in granted))
            node.loop.after(int(self.draw.transfer_ns * (0.5 + self._random())), self._fetched, answer.lease_id, granted)

    def _fetched(self, lease_id: int, granted: Sequence[tuple[Reserve, int]]) -> None:
        node = self.node
        if not self.alive():
            node.loop.stale()
            return
        for item, _ in granted:
            self._fetching.pop(item.key, None)
        now_ns = node.settle()
        view = node.arena.view
        if not node.pool.leased_ranges(lease_id, [(offset, item.length) for item, offset in granted], write=True):
            node.finish(lease_id, [], now_ns)
            return
        wanted = [(item.key, np.frombuffer(view, np.uint8, item.length, offset)) for item, offset in granted]
        there = self.stored([key for key, _ in wanted])
        failures, deadline_ns = node.ground.disk.read_failures, self._deadline()
        got = self._run(lambda: self.tier.get(wanted, deadline_ns))
        if got is None:
            return
        if failures == node.ground.disk.read_failures and not node.ground.disk.lied and self._clock.now_ns() < deadline_ns:
            for (key, _), listed, ok in zip(wanted, there, got, strict=True):
                if listed and not ok:
                    raise Violation(f"{node.judge.name(key)} is listed by the tier below, and it can't give it")
        if node.note is not None:
            node.note("below", "fetch", (tuple(key for key, _ in wanted),), tuple(got))
        keys = [key for (key, _), ok in zip(wanted, got, strict=True) if ok]
        for (item, offset), (_, data), ok in zip(granted, wanted, got, strict=True):
            if ok:
                node.coverage.hit("block fetched from below")
                self._check_bytes(item.key, offset, data.tobytes())
        node.finish(lease_id, keys, now_ns)
        self.committed([key for key in keys if node.pool.locate(key) is not None], 0, clean=True)
        node.judge.after(node.pool, now_ns)

    def _item(self, entry: Entry) -> Reserve:
        ttl_ns = max(1, entry.expires_ms * MS - self.node.wall_ns()) if entry.expires_ms else 0
        return Reserve(entry.key, entry.parent, entry.depth, entry.length, ttl_ns, entry.sequence, tenant=entry.tenant)

    def _check_bytes(self, key: BlockKey, offset: int, data: bytes) -> None:
        """A tier gives back what it was given: the block's bytes, or damaged ones if the arena's were damaged when they were written."""
        judge = self.node.judge
        if xxh3_64_intdigest(data) not in self.node.ground.given.get(key, ()):
            raise Violation(f"the tier below gave bytes for {judge.name(key)} that it was never given")
        if frames.opens(data, key):
            judge.delivers(key, len(data), data)
            return
        judge.taint(offset, len(data))
        self.node.coverage.hit("damaged block came back from below")

    # Deaths

    def _deadline(self) -> int:
        """For a transfer that begins now, on the tier's clock."""
        return self._clock.now_ns() + 2 * SPEED * self.draw.transfer_ns

    def _run(self, call: Callable[[], T]) -> T | None:
        """A tier call; None when the process died in its middle, or before."""
        return self.node.die_or(call) if self.alive() else None

    def kept(self) -> "Kept":
        """What a durable tier must still have after this life, and what must not come back."""
        if not self.tier.durable:
            return Kept({}, ())
        counters = self.tier.books().counters
        if counters.get("segments_reclaimed", 0) or counters.get("segments_compacted", 0):
            self.node.coverage.hit("log reclaimed a segment")
        listed = self.tier.find(list(self.acknowledged))
        there = {key: expires for (key, expires), entry in zip(self.acknowledged.items(), listed, strict=True) if entry is not None}
        settled = not counters.get("pending_removals", 0)
        return Kept(there, tuple(self.removed) if settled else ())

    def recovered(self, kept: "Kept", *, sound: bool) -> None:
        """A new life: what was acknowledged is listed, what was removed isn't. Of a disk that lied or couldn't be read nothing is asked."""
        name, now_ms = self.node.judge.name, self.wall_ms()
        if not sound:
            self.node.coverage.hit("restart on a disk that lied")
            return
        for (key, expires_ms), entry in zip(kept.there.items(), self.tier.find(list(kept.there)), strict=True):
            if entry is not None:
                self.acknowledged[key] = expires_ms
                self.node.coverage.hit("restart adopted what was written down")
            elif not is_expired(expires_ms, now_ms) and not self._full():
                raise Violation(f"{name(key)} was written down and acknowledged, and is gone after a restart")
        for entry in list(self.tier.entries()):
            if self.tier.verify(entry.key) is False:
                raise Violation(f"{name(entry.key)} was adopted after a restart, and its bytes are wrong")
        for key, entry in zip(kept.removed, self.tier.find(kept.removed), strict=True):
            if entry is not None:
                raise Violation(f"{name(key)} was removed, and is back after a restart")
            self.removed[key] = None

    def _full(self) -> bool:
        """Whether there were more records than the tier may hold: what was being written at the death may have taken others' places."""
        books = self.tier.books()
        surplus = self.tier.recovery.surplus if isinstance(self.tier, SsdTier) else 0
        return surplus > 0 or books.objects >= books.max_objects


class Kept(NamedTuple):
    """What one life leaves to the next: acknowledged records by key with their expiry (unix ms), and keys that were removed."""

    there: dict[BlockKey, int]
    removed: tuple[BlockKey, ...]
