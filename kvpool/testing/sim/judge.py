"""The checkers: every answer of the node is held against the truth, every byte a reader accepts against the write that made it.

Theory. The judge sees each call when the node handles it, with its answer, and keeps `Truth`. What follows from the rules it predicts
exactly (what a commit, an acquire, a renewal answers; which leases are alive); what the pool may choose (victims, places, moves) it accepts
and checks: victims were free to go, places were nobody's, moves kept clear of what is held. The first difference ends the world.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy

from kvpool.block import BlockKey
from kvpool.pool import EXISTS, Acquired, Granted, Move, PinOutcome, PoolLimits, PoolState, Reserve, Reserved
from kvpool.testing.sim.frames import is_exact
from kvpool.testing.sim.marks import Coverage
from kvpool.testing.sim.truth import Copy, Held, Truth
from kvpool.testing.sim.world import UNIT


class Violation(Exception):
    """The node broke a promise. The message says which."""


class Judge:
    """Checks one node through all its lives. `name` spells a key for messages."""

    def __init__(
        self, limits: PoolLimits, capacity_bytes: int, audit_every: int, coverage: Coverage, name: Callable[[BlockKey], str]
    ) -> None:
        self.truth = Truth(capacity_bytes, limits.fence_ns)
        self.coverage = coverage
        self.name = name
        self.delivered = 0
        self.caller: tuple[int, object] = (-1, None)
        self.may_leave: Callable[[BlockKey], bool] = lambda key: True
        self._limits = limits
        self._capacity_bytes = capacity_bytes
        self._audit_every = audit_every
        self._calls = 0
        self._evicted = self._refused = 0
        self._every_key: tuple[BlockKey, ...] = ()

    def watch(self, keys: Sequence[BlockKey]) -> None:
        """All keys there are in this world, for audits."""
        self._every_key = tuple(keys)

    def restarted(self) -> None:
        """A new life: memory is empty, ids begin anew."""
        if self.truth.leases:
            self.coverage.hit("restart with leases outstanding")
        self.truth = Truth(self._capacity_bytes, self._limits.fence_ns)
        self._evicted = self._refused = 0

    # Calls, before and after the node has handled them

    def before(self, now_ns: int) -> None:
        """A call arrives: whatever is due is over."""
        truth = self.truth
        if truth.next_due_ns() > now_ns:
            return
        ran_out, expired, pins = truth.ran_out, truth.expired, truth.pins_ran_out
        if any(
            held.deadline_ns > now_ns and not held.write and any(c.expires_ns <= now_ns for c in held.copies)
            for held in truth.leases.values()
        ):
            self.coverage.hit("ttl passed under a reader")
        truth.settle(now_ns)
        for mark, more in (
            ("lease ran out", truth.ran_out > ran_out),
            ("block expired", truth.expired > expired),
            ("pin ran out", truth.pins_ran_out > pins),
        ):
            if more:
                self.coverage.hit(mark)

    def after(self, pool: PoolState, now_ns: int) -> None:
        """The call is done: books balance, no lease too many or too few; now and then everything is recounted."""
        truth, books = self.truth, pool.books()
        if books.free + books.used + books.pinned != books.capacity or books.capacity != self._capacity_bytes:
            raise Violation(f"books don't balance: {books}")
        live = (len(truth.leases) - truth.writes, truth.writes)
        if (books.read_leases, books.write_leases) != live:
            raise Violation(f"(read, write) leases live: {live}, booked {(books.read_leases, books.write_leases)}")
        if books.blocks != len(truth.committed):
            raise Violation(f"{books.blocks} blocks are committed, not {len(truth.committed)}")
        if len(truth.leases) > self._limits.max_leases or truth.references > self._limits.max_leased_blocks:
            raise Violation(f"{len(truth.leases)} leases over {truth.references} blocks are more than the limits allow")
        self._calls += 1
        if self._calls % self._audit_every == 0:
            self.audit(pool)

    def audit(self, pool: PoolState) -> None:
        """Recount everything: the pool's own invariants, every key's place, bytes by account, quotas, counters."""
        pool.check()
        truth, books, counters = self.truth, pool.books(), pool.counters()
        for key in self._every_key:
            at, copy = pool.locate(key), truth.committed.get(key)
            if (None if at is None else (at.offset, at.length)) != (None if copy is None else (copy.offset, copy.length)):
                raise Violation(f"{self.name(key)} is at {at}, not {None if copy is None else (copy.offset, copy.length)}")
        counted = (truth.units.count(0) * UNIT, truth.units.count(1) * UNIT, truth.units.count(2) * UNIT)
        if counted != (books.free, books.used, books.pinned):
            raise Violation(f"(free, used, pinned) is {counted}, booked {(books.free, books.used, books.pinned)}")
        if (counters["inserted"], counters["expired"], counters["reclaimed_leases"]) != (truth.inserted, truth.expired, truth.ran_out):
            raise Violation(
                f"inserted, expired, reclaimed: {truth.inserted}, {truth.expired}, {truth.ran_out} happened, counted {counters}"
            )
        if counters["hits"] != truth.hits:
            raise Violation(f"{counters['hits']} hits counted, readers found {truth.hits} blocks")
        if books.blocks + len(truth.reserved) > self._limits.max_blocks:
            raise Violation(f"{books.blocks} blocks and {len(truth.reserved)} reservations, at most {self._limits.max_blocks}")
        used = {tenant: quota.used_bytes for tenant, quota in pool.quotas().items() if quota.used_bytes}
        if used != {tenant: units * UNIT for tenant, units in truth.tenant_units.items() if units}:
            raise Violation(f"tenants have {truth.tenant_units} units, booked {used}")

    def reserved(self, pool: PoolState, items: Sequence[Reserve], lease_ns: int, answer: Reserved, now_ns: int) -> None:
        """Who left to make room, what moved, whose bytes were handed out."""
        truth = self.truth
        evicted = self._evictions(pool, items)
        self._moves(answer.moves)
        lone = len(items) == 1 and items[0].parent is None and not truth.pins and not any(unit == 2 for unit in truth.units)
        lone = lone and not truth.leases and not truth.holds
        copies: list[Copy] = []
        seen = set[BlockKey]()
        for item, grant in zip(items, answer.grants, strict=True):
            there = item.key in seen or item.key in truth.committed or item.key in truth.reserved
            if (grant is EXISTS) != there:
                raise Violation(f"reserve of {self.name(item.key)} answered {grant}, it {'is' if there else 'is not'} there")
            if grant is EXISTS:
                self.coverage.hit("call answered EXISTS")
            elif isinstance(grant, Granted):
                seen.add(item.key)
                if not truth.is_free(grant.offset, item.length):
                    raise Violation(f"{self.name(item.key)} was granted {grant.offset}+{item.length}, which is somebody's")
                copy = Copy(item, grant.offset, answer.lease_id)
                truth.grant(copy)
                copies.append(copy)
            else:
                self.coverage.hit("call answered NO_SPACE")
                if lone and not answer.waiting and self._room_for(item):
                    raise Violation(f"no room for {self.name(item.key)}:{item.length} though nothing is held")
        if evicted and not any(isinstance(grant, Granted) for grant in answer.grants) and not any(g is not EXISTS for g in answer.grants):
            raise Violation(f"{[self.name(copy.key) for copy in evicted]} evicted for nothing")
        if (answer.lease_id != 0) != bool(copies):
            raise Violation(f"lease {answer.lease_id} for {len(copies)} grants")
        if copies:
            self._open(answer.lease_id, True, copies, lease_ns, now_ns)
        self._quotas(pool, copies)

    def committed(self, lease_id: int, keys: Sequence[BlockKey], answer: Sequence[bool], now_ns: int) -> None:
        """Only a live lease publishes, and only what it reserved."""
        truth = self.truth
        held = self._lease(lease_id)
        if held is None or not held.write:
            if lease_id:
                self.coverage.hit("commit after lease end")
            expected = [False] * len(keys)
        else:
            expected = [self._publish(held, key, now_ns) for key in keys]
            if not held.copies:
                truth.end(held, now_ns)
        if list(answer) != expected:
            raise Violation(f"commit under lease {lease_id} of {[self.name(k) for k in keys]} answered {list(answer)}, not {expected}")

    def acquired(self, keys: Sequence[BlockKey], lease_ns: int, answer: Acquired, now_ns: int) -> None:
        """Exactly what is committed is found, where it lies."""
        truth = self.truth
        wanted = [truth.committed.get(key) for key in keys]
        hits = [copy for copy in wanted if copy is not None]
        if hits and (len(truth.leases) >= self._limits.max_leases or truth.references + len(hits) > self._limits.max_leased_blocks):
            self.coverage.hit("lease at its limit refused")
            wanted, hits = [None] * len(keys), []
        found = [None if at is None else (at.offset, at.length) for at in answer.found]
        expected = [None if copy is None else (copy.offset, copy.length) for copy in wanted]
        if found != expected:
            raise Violation(f"acquire of {[self.name(key) for key in keys]} found {found}, not {expected}")
        if (answer.lease_id != 0) != bool(hits):
            raise Violation(f"lease {answer.lease_id} for {len(hits)} blocks found")
        truth.hits += len(hits)
        if hits:
            self._open(answer.lease_id, False, hits, lease_ns, now_ns)
            for copy in hits:
                truth.grip(copy)

    def held(self, keys: Sequence[BlockKey], places: Sequence[tuple[int, int]], lease_id: int, lease_ns: int, now_ns: int) -> None:
        """The node holds blocks to write them down: they are where they are, and not used by it."""
        copies = [self.truth.committed[key] for key in keys]
        if [(copy.offset, copy.length) for copy in copies] != [tuple(place) for place in places]:
            raise Violation(f"{[self.name(key) for key in keys]} are written down from {places}")
        self._open(lease_id, False, copies, lease_ns, now_ns)
        for copy in copies:
            self.truth.grip(copy)

    def let_go(self, lease_id: int, now_ns: int) -> None:
        """The node has written them, or tried."""
        held = self.truth.leases.get(lease_id)
        if held is not None:
            self.truth.end(held, now_ns)

    def looked_up(self, keys: Sequence[BlockKey], answer: bytes) -> None:
        """A probe tells what is committed."""
        expected = bytes(key in self.truth.committed for key in keys)
        if answer != expected:
            raise Violation(f"lookup of {[self.name(key) for key in keys]} answered {list(answer)}, not {list(expected)}")

    def renewed(self, lease_id: int, lease_ns: int, answer: bool, now_ns: int) -> None:
        """A live lease is renewed, an ended one isn't."""
        held = self._lease(lease_id)
        if answer != (held is not None):
            raise Violation(f"renewal of lease {lease_id} answered {answer}")
        if held is not None:
            self.coverage.hit("lease renewed")
            self.truth.extend(held, now_ns + min(lease_ns, self._limits.max_lease_ns))

    def released(self, lease_id: int, answer: bool, now_ns: int) -> None:
        """A live lease is ended; twice is told apart."""
        held = self._lease(lease_id)
        if answer != (held is not None):
            raise Violation(f"release of lease {lease_id} answered {answer}")
        if held is not None:
            self.truth.end(held, now_ns)

    def covered(self, lease_id: int, offset: int, length: int, write: bool, answer: bool) -> None:
        """Bytes over the control connection move only under a live lease of the right kind that holds them."""
        held = self._lease(lease_id)
        expected = held is not None and held.write == write
        if held is not None and held.slab is not None:
            start, units = held.slab
            expected = write and start * UNIT <= offset and offset + length <= (start + units) * UNIT
        elif held is not None and expected:
            expected = any(copy.offset <= offset and offset + length <= copy.offset + copy.units * UNIT for copy in held.copies)
        if answer != expected:
            raise Violation(
                f"lease {lease_id} {'covers' if answer else 'does not cover'} {offset}+{length} to {'write' if write else 'read'}"
            )

    def same_order(self, pool: PoolState, before: list[BlockKey]) -> None:
        """A probe has changed no order."""
        if self.order_of(pool) != before:
            raise Violation("a probe changed the order of eviction")

    def discarded(self, key: BlockKey, answer: bool) -> None:
        """An unwanted or damaged block is unlinked at once; bytes under a lease wait."""
        truth = self.truth
        copy = truth.committed.get(key) or truth.reserved.get(key)
        if answer != (copy is not None):
            raise Violation(f"discard of {self.name(key)} answered {answer}")
        if copy is not None and truth.discard(copy):
            self.coverage.hit("discarded while leased")

    def pinned(self, keys: Sequence[BlockKey], owner: str, hard: bool, deadline_ns: int, answer: Sequence[PinOutcome], now_ns: int) -> None:
        """What is committed is pinned, as far as the limits go."""
        truth, limits = self.truth, self._limits
        most = self._capacity_bytes * limits.max_pinned_percent // 100
        for key, outcome in zip(keys, answer, strict=True):
            copy = truth.committed.get(key)
            expected = PinOutcome.ABSENT
            if copy is not None:
                full = owner not in copy.pins and truth.pins >= limits.max_pins
                heavy = hard and not copy.hard and (truth.hard_units + copy.units) * UNIT > most
                expected = PinOutcome.REFUSED if full or heavy else PinOutcome.PINNED
                if not full and not heavy:
                    truth.pin(copy, owner, hard, deadline_ns, now_ns)
                elif heavy:
                    self.coverage.hit("pin refused at its share")
            if outcome is not expected:
                raise Violation(f"pin of {self.name(key)} answered {outcome}, not {expected}")

    def unpinned(self, keys: Sequence[BlockKey], owner: str, answer: int, now_ns: int) -> None:
        """Exactly this owner's pins end."""
        copies = [self.truth.committed.get(key) for key in keys]
        expected = sum(copy is not None and self.truth.unpin(copy, owner, now_ns) for copy in copies)
        if answer != expected:
            raise Violation(f"unpin of {[self.name(key) for key in keys]} answered {answer}, not {expected}")

    def suspected(self, key: BlockKey, opens: bool) -> None:
        """After a reader's complaint was looked into: a block whose frame doesn't open is not committed any more."""
        if not opens and key in self.truth.committed:
            raise Violation(f"{self.name(key)} is damaged, was complained about, and is still served")

    def delivers(self, key: BlockKey, length: int, frame: bytes) -> None:
        """A reader takes these bytes for `key`: they must be exactly right."""
        self.delivered += 1
        if not is_exact(frame, key, length):
            raise Violation(f"a reader took wrong bytes for {self.name(key)}")

    def refused(self, lease_id: int, key: BlockKey) -> None:
        """A reader with a live lease found a bad frame: something must have damaged it, a zombie or a fault."""
        truth = self.truth
        for copy in truth.leases[lease_id].copies:
            start = copy.offset // UNIT
            if copy.key == key and not any(truth.tainted[start : start + copy.units]):
                raise Violation(f"the bytes of {self.name(key)} changed under lease {lease_id}, and nobody may have written them")

    def taint(self, offset: int, length: int) -> bool:
        """Bytes there were changed by nobody who may. True when they belong to somebody."""
        truth, start = self.truth, offset // UNIT
        units = -(-(offset + length) // UNIT) - start
        truth.tainted[start : start + units] = b"\1" * units
        return any(truth.units[start : start + units])

    def is_fenced(self, offset: int) -> bool:
        """Whether the bytes there wait for a writer whose lease ran out."""
        return any(start * UNIT <= offset < (start + units) * UNIT for start, units in self.truth.fenced)

    def order_of(self, pool: PoolState) -> list[BlockKey]:
        """The order of eviction, without touching it."""
        return list(deepcopy(pool._pens).victims())

    # Parts of the above

    def _lease(self, lease_id: int) -> Held | None:
        """A live lease, which its own client must be the one to use."""
        held = self.truth.leases.get(lease_id)
        if held is not None and held.caller != self.caller:
            raise Violation(f"{self.caller} used lease {lease_id}, which {held.caller} holds")
        return held

    def _open(self, lease_id: int, write: bool, copies: list[Copy], lease_ns: int, now_ns: int) -> None:
        if lease_id <= self.truth.last_lease:
            raise Violation(f"lease id {lease_id} after {self.truth.last_lease}")
        self.truth.open(lease_id, write, copies, now_ns + min(lease_ns, self._limits.max_lease_ns)).caller = self.caller

    def _publish(self, held: Held, key: BlockKey, now_ns: int) -> bool:
        for copy in held.copies:
            if copy.key == key:
                return self.truth.publish(held, copy, now_ns)
        again = self.truth.committed.get(key)
        if again is not None and again.writer == held.id:
            self.coverage.hit("commit repeated")
            return True
        return False

    def _evictions(self, pool: PoolState, items: Sequence[Reserve]) -> list[Copy]:
        """Copies that left for `items`: nobody held them, the call didn't name them."""
        truth = self.truth
        count = pool.counters()["evicted"]
        gone = [copy for copy in truth.committed.values() if pool.locate(copy.key) is None] if count != self._evicted else []
        if count - self._evicted != len(gone):
            raise Violation(f"{count - self._evicted} evictions counted, {len(gone)} blocks are gone")
        self._evicted = count
        if not gone:
            return gone
        self.coverage.hit("block evicted")
        named = {item.key for item in items} | {item.parent for item in items}
        for copy in gone:
            if copy.grips or copy.key in named or copy.key in truth.holds:
                raise Violation(f"{self.name(copy.key)} was evicted, {'named by the call' if copy.key in named else 'held'}")
            if not self.may_leave(copy.key):
                raise Violation(f"{self.name(copy.key)} was evicted before it was written down")
        self._softness(pool, gone, named)
        if any(copy.tenant in truth.quotas for copy in gone):
            self.coverage.hit("quota made a tenant evict its own")
        if truth.hard_units:
            self.coverage.hit("pin hard held a block in eviction")
        for copy in gone:
            truth.forget(copy)
        return gone

    def _softness(self, pool: PoolState, gone: list[Copy], named: set[BlockKey | None]) -> None:
        """A softly pinned block leaves only when nothing else could. Heads of what stays may be kept for its sake."""
        truth = self.truth
        soft = [copy for copy in gone if copy.pins]
        if truth.pins and not soft:
            self.coverage.hit("soft pin outlived others")
        if not soft or truth.quotas:
            return
        left = {copy.key for copy in gone}
        heads = {copy.parent for copy in truth.committed.values() if copy.key not in left}
        for copy in truth.committed.values():
            kept = copy.pins or copy.grips or copy.key in truth.holds
            free = not kept and copy.key not in named and copy.key not in left and copy.key not in heads
            if free and (view := pool.view(copy.key)) is not None and not view.dirty:
                raise Violation(f"softly pinned {self.name(soft[0].key)} was evicted before {self.name(copy.key)}")

    def _moves(self, moves: Sequence[Move]) -> None:
        """Relocated copies were nobody's to hold; where they went was free."""
        if not moves:
            return
        self.coverage.hit("relocated blocks")
        truth = self.truth
        at = {copy.offset: copy for copy in truth.committed.values()}
        moved: list[Copy] = []
        for move in moves:
            copy = at.pop(move.source, None)
            if copy is None:
                continue  # it was moved, and evicted after that by the same call
            if copy.grips or copy.key in truth.holds or move.size != copy.units * UNIT:
                raise Violation(f"{self.name(copy.key)} was moved from {move.source} to {move.target}, held {copy.grips} times")
            if copy not in moved:
                truth.paint(copy, 0)
                moved.append(copy)
            source, target = move.source // UNIT, move.target // UNIT
            truth.tainted[target : target + copy.units] = truth.tainted[source : source + copy.units]
            copy.offset = move.target
            at[move.target] = copy
        for copy in moved:
            if not truth.is_free(copy.offset, copy.length):
                raise Violation(f"{self.name(copy.key)} was moved onto somebody's bytes at {copy.offset}")
            truth.paint(copy, 1)

    def _quotas(self, pool: PoolState, copies: list[Copy]) -> None:
        refused = pool.counters()["refused_quota"]
        if refused > self._refused:
            self._refused = refused
            self.coverage.hit("quota refused")
        for tenant in {copy.tenant: None for copy in copies}:
            limit = self.truth.quotas.get(tenant)
            used = self.truth.tenant_units[tenant] * UNIT
            if limit is not None and used > limit:
                raise Violation(f"tenant {tenant} has {used} bytes, its quota is {limit}")

    def _room_for(self, item: Reserve) -> bool:
        return item.tenant not in self.truth.quotas and -(-item.length // UNIT) * UNIT <= self._capacity_bytes
