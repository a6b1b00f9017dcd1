"""What an operator may ask of this node: `AdminHandler` over the pool and its tiers.

Inspecting and listing read indexes only. Scrubbing (`verify`) reads bytes: of the arena in a worker thread, under a lease that is no use
of the blocks; of other tiers by the tier itself. A cursor is the last key checked: keys are walked in order of their bytes, so blocks
that come and go meanwhile don't disturb it.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

from kvpool.block import KEY_BYTES, BlockKey, check_frame
from kvpool.block.header import decode_header
from kvpool.clock import Clock
from kvpool.errors import ConfigError, FrameError
from kvpool.node.balancer import Balancer
from kvpool.node.handler import NodeHandler
from kvpool.node.pushing import OWNER as BALANCE
from kvpool.node.resp.frames import PARENT as VALUES
from kvpool.node.tiers import Found, Tiers
from kvpool.policy.eviction import NEVER_NS
from kvpool.policy.placement import DEFAULT_EXTENT_TOKENS, NodeState
from kvpool.pool import BlockView, PinOutcome, PoolState
from kvpool.pool.flow import OWNER as FLUSH
from kvpool.request import admin as a
from kvpool.security.tenants import TenantBook
from kvpool.tier import Arena
from kvpool.tier.contract import Tier
from kvpool.tier.memory import unix_ms
from kvpool.units import MS, SECOND
from kvpool.wire.fence import NodeIdentity

ARENA = "dram"
_SCRUB = "scrub"
_NODE_OWNERS = frozenset({FLUSH, _SCRUB, BALANCE, "promotion", "near"})
_SCRUB_LEASE_NS = 60 * SECOND


class NodeAdmin:
    """`AdminHandler` of one node."""

    def __init__(self, handler: NodeHandler, state: PoolState, arena: Arena, tiers: Tiers, clock: Clock) -> None:
        self._handler = handler
        self._state = state
        self._arena = arena
        self._tiers = tiers
        self._clock = clock
        self.balancer: Balancer | None = None
        self._book: TenantBook | None = None

    def keep_quotas(self, book: TenantBook) -> None:
        """Take the quotas in `book`, and keep those that are set from now on there. Raises `ConfigError` for more than the pool keeps."""
        for tenant, limits in book.all().items():
            self._state.set_quota(tenant, limits.max_bytes or None)
        self._book = book

    @property
    def identity(self) -> NodeIdentity:
        """Who answers."""
        return self._handler.identity

    async def inspect(self, keys: Sequence[BlockKey], *, story: bool) -> Sequence[a.Inspection]:
        """See `AdminHandler.inspect`."""
        lower = self._tiers.find(keys)
        return [self._inspect(key, found, story=story) for key, found in zip(keys, lower, strict=True)]

    async def evict(self, keys: Sequence[BlockKey], *, dry_run: bool) -> Sequence[a.EvictOutcome]:
        """See `AdminHandler.evict`."""
        outcomes = [self._evictable(key, found) for key, found in zip(keys, self._tiers.find(keys), strict=True)]
        if not dry_run:
            going = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome in (a.EvictOutcome.EVICTED, a.EvictOutcome.HELD)]
            for key in going:
                self._state.discard(key)
            await self._tiers.remove(going)
        return outcomes

    async def pin(self, keys: Sequence[BlockKey], *, hard: bool, duration_ms: int, owner: str) -> Sequence[a.PinOutcome]:
        """See `AdminHandler.pin`. A block that only another tier holds is brought into the arena first."""
        missing = [key for key in keys if self._state.locate(key) is None]
        if missing and self._tiers.has_any(missing):
            await self._tiers.bring(missing, self._clock.now_ns() + 20 * SECOND)
        now_ns = self._clock.now_ns()
        answers = self._state.pin(keys, owner=owner, hard=hard, duration_ns=duration_ms * MS, now_ns=now_ns)
        return [_PINS[answer] for answer in answers]

    async def unpin(self, keys: Sequence[BlockKey], *, owner: str) -> int:
        """See `AdminHandler.unpin`."""
        return self._state.unpin(keys, owner=owner, now_ns=self._clock.now_ns())

    async def set_quota(self, tenant: str, max_bytes: int) -> None:
        """See `AdminHandler.set_quota`."""
        if self._book is not None:
            await asyncio.to_thread(self._book.change, tenant, max_bytes=max_bytes)
        self._state.set_quota(tenant, max_bytes or None)

    async def quotas(self) -> Sequence[a.Quota]:
        """See `AdminHandler.quotas`."""
        known = list(self._state.quotas().items())[: a.MAX_QUOTAS]
        return [a.Quota(tenant=tenant, used_bytes=quota.used_bytes, max_bytes=quota.max_bytes) for tenant, quota in known]

    async def gc(self, *, dry_run: bool) -> a.GcReport:
        """See `AdminHandler.gc`. What has run out ends by itself within a tenth of a second, so there is little left to end."""
        now_ns = self._clock.now_ns()
        leases, blocks, nbytes = self._state.due(now_ns)
        orphans = self._orphans()
        before = self._state.books().free
        dead = sum(tier.books().counters.get("dead_bytes", 0) for tier in self._tiers.all())
        if not dry_run:
            self._state.tick(now_ns)
        return a.GcReport(
            expired_leases=leases,
            expired_blocks=blocks,
            orphan_blocks=len(orphans),
            orphan_bytes=sum(view.size for view in orphans),
            dead_bytes=dead,
            reclaimed_bytes=nbytes if dry_run else self._state.books().free - before,
        )

    async def verify(self, tier: str, *, cursor: str, max_bytes: int) -> a.VerifyReport:
        """See `AdminHandler.verify`."""
        after = _cursor_key(cursor)
        if tier == ARENA:
            return await self._verify_arena(after, max_bytes)
        for one in self._tiers.all():
            if one.name == tier:
                return await self._verify_tier(one, after, max_bytes)
        names = ", ".join([ARENA, *(one.name for one in self._tiers.all())])
        raise ConfigError(f"this node has no tier {tier!r}; it has {names}")

    async def tiers(self) -> Sequence[a.TierReport]:
        """See `AdminHandler.tiers`."""
        books = self._state.books()
        arena = a.TierReport(
            name=ARENA,
            state="ok",
            reason="",
            capacity_bytes=books.capacity,
            used_bytes=books.capacity - books.free,
            objects=books.blocks,
            max_objects=self._state.limits.max_blocks,
            counters={**self._state.counters(), **self._tiers.counted()},
        )
        reports = [arena] if self._tiers.beside is None else [_report(self._tiers.beside), arena]
        return reports if self._tiers.below is None else [*reports, _report(self._tiers.below)]

    async def drain(self, *, cancel: bool, bytes_per_s: int) -> a.Balance:
        """See `AdminHandler.drain`."""
        if self.balancer is None:
            raise ConfigError("this node is in no cluster: there is nobody to drain it to")
        self.balancer.drain(cancel=cancel, bytes_per_s=bytes_per_s)
        return self.balancer.report()

    async def balance(self) -> a.Balance:
        """See `AdminHandler.balance`. A node that stands alone holds what it holds."""
        if self.balancer is not None:
            return self.balancer.report()
        books = self._state.books()
        used = books.capacity - books.free
        return a.Balance(
            state=NodeState.ACTIVE, settled=True, blocks=books.blocks, block_bytes=used, safe_blocks=books.blocks, safe_bytes=used
        )

    def _inspect(self, key: BlockKey, found: Found | None, *, story: bool) -> a.Inspection:
        lines = tuple(line[: a.MAX_TEXT_CHARS] for line in self._state.story(key)[-a.MAX_STORY_LINES :]) if story else ()
        view = self._state.view(key, holders=True)
        places: list[a.TierPlace] = []
        if view is not None:
            offset, length = view.location
            places.append(a.TierPlace(name=ARENA, length=length, offset=offset, state="committed"))
        for tier in self._tiers.all():
            entry = tier.find([key], unix_ms())[0]
            if entry is not None:
                places.append(a.TierPlace(name=tier.name, length=entry.length, offset=0, state="stored"))
        if view is not None:
            return self._inspection(view, tuple(places), lines)
        if found is None:
            return a.Inspection(key=key, story=lines)
        entry = found.entry
        return a.Inspection(
            key=key,
            tiers=tuple(places),
            parent=entry.parent or b"",
            depth=entry.depth,
            size=entry.length,
            ttl_left_ms=max(0, entry.expires_ms - unix_ms()) if entry.expires_ms else None,
            tenant=entry.tenant,
            story=lines,
        )

    def _inspection(self, view: BlockView, places: tuple[a.TierPlace, ...], lines: tuple[str, ...]) -> a.Inspection:
        now_ns = self._clock.now_ns()
        try:
            header = decode_header(self._arena.view(*view.location).data)
            n_tokens, flags = header.n_tokens, int(header.flags)
        except FrameError:
            n_tokens, flags = 0, 0  # not a frame of ours, or damaged: `verify` finds the latter
        holders = sorted(view.holders, key=lambda one: -one.deadline_ns)
        pins = sorted(view.pins, key=lambda one: -one.deadline_ns)
        return a.Inspection(
            key=view.key,
            tiers=places,
            parent=view.parent or b"",
            depth=view.depth,
            n_tokens=n_tokens,
            flags=flags,
            size=view.size,
            age_ms=(now_ns - view.committed_ns) // MS,
            idle_ms=(now_ns - view.used_ns) // MS,
            hits=view.hits,
            ttl_left_ms=None if view.expires_ns == NEVER_NS else _left_ms(view.expires_ns, now_ns),
            priority=view.priority,
            tenant=view.tenant,
            leases=tuple(
                a.LeaseHolder(
                    id=one.lease_id,
                    owner=one.owner,
                    kind="write" if one.write else "hold" if one.owner in _NODE_OWNERS else "read",
                    left_ms=_left_ms(one.deadline_ns, now_ns),
                )
                for one in holders[: a.MAX_HOLDERS]
            ),
            lease_count=len(holders),
            pins=tuple(
                a.PinHolder(owner=one.owner, hard=one.hard, left_ms=_left_ms(one.deadline_ns, now_ns)) for one in pins[: a.MAX_HOLDERS]
            ),
            pin_count=len(pins),
            story=lines,
        )

    def _evictable(self, key: BlockKey, found: Found | None) -> a.EvictOutcome:
        view = self._state.view(key, holders=True)
        if view is not None:
            if any(pin.hard for pin in view.pins):
                return a.EvictOutcome.PINNED
            return a.EvictOutcome.HELD if view.holders else a.EvictOutcome.EVICTED
        if self._state.writing(key):
            return a.EvictOutcome.HELD
        return a.EvictOutcome.ABSENT if found is None else a.EvictOutcome.EVICTED

    def _orphans(self) -> list[BlockView]:
        """Blocks whose predecessor is in no tier here although it should be: not the first of an extent, which may live elsewhere, and
        not clients' values, which have none."""
        views = [view for key in self._state.committed_keys() if (view := self._state.view(key)) is not None]
        inner = [view for view in views if view.parent is not None and view.depth % DEFAULT_EXTENT_TOKENS]
        missing = [view for view in inner if view.parent not in (None, VALUES) and self._state.locate(view.parent) is None]
        lower = self._tiers.find([view.parent for view in missing if view.parent is not None])
        return [view for view, found in zip(missing, lower, strict=True) if found is None]

    async def _verify_arena(self, after: bytes, max_bytes: int) -> a.VerifyReport:
        keys = sorted(self._state.committed_keys())
        chosen: list[BlockKey] = []
        nbytes = 0
        for key in keys[bisect_right(keys, after) :]:
            place = self._state.locate(key)
            if place is None or (chosen and nbytes + place.length > max_bytes):
                break
            chosen.append(key)
            nbytes += place.length
        held = self._state.hold(chosen, owner=_SCRUB, lease_ns=_SCRUB_LEASE_NS, now_ns=self._clock.now_ns())
        frames = [(key, self._arena.view(*place)) for key, place in zip(chosen, held.found, strict=True) if place is not None]
        try:
            corrupt = await asyncio.to_thread(lambda: [key for key, frame in frames if not _sound(frame, key)])
        finally:
            self._state.release(held.lease_id, self._clock.now_ns())
        for key in corrupt:
            self._handler.drop_damaged(key)
        return _verified(chosen, nbytes, corrupt, done=len(chosen) == len(keys) - bisect_right(keys, after))

    async def _verify_tier(self, tier: Tier, after: bytes, max_bytes: int) -> a.VerifyReport:
        lengths = {entry.key: entry.length for entry in await asyncio.to_thread(lambda: list(tier.entries()))}
        keys = sorted(key for key in lengths if key > after)
        chosen: list[BlockKey] = []
        nbytes = 0
        for key in keys:
            if chosen and nbytes + lengths[key] > max_bytes:
                break
            chosen.append(key)
            nbytes += lengths[key]
        verdicts = await asyncio.to_thread(lambda: [tier.verify(key) for key in chosen])
        corrupt = [key for key, verdict in zip(chosen, verdicts, strict=True) if verdict is False]
        return _verified(chosen, nbytes, corrupt, done=len(chosen) == len(keys))


_PINS = {
    PinOutcome.PINNED: a.PinOutcome.PINNED,
    PinOutcome.ABSENT: a.PinOutcome.ABSENT,
    PinOutcome.REFUSED: a.PinOutcome.REFUSED,
}


def _left_ms(deadline_ns: int, now_ns: int) -> int:
    return max(0, deadline_ns - now_ns) // MS


def _sound(frame: object, key: BlockKey) -> bool:
    try:
        check_frame(frame, key)  # type: ignore[arg-type]
    except FrameError:
        return False
    return True


def _verified(chosen: Sequence[BlockKey], nbytes: int, corrupt: Sequence[BlockKey], *, done: bool) -> a.VerifyReport:
    return a.VerifyReport(
        checked=len(chosen),
        checked_bytes=nbytes,
        corrupt=tuple(corrupt[: a.MAX_CORRUPT_KEYS]),
        corrupt_count=len(corrupt),
        cursor="" if done or not chosen else chosen[-1].hex(),
    )


def _report(tier: Tier) -> a.TierReport:
    books = tier.books()
    return a.TierReport(
        name=tier.name,
        state=books.state,
        reason=books.reason[: a.MAX_TEXT_CHARS],
        capacity_bytes=books.capacity_bytes,
        used_bytes=books.used_bytes,
        objects=books.objects,
        max_objects=books.max_objects,
        counters=books.counters,
    )


def _cursor_key(cursor: str) -> bytes:
    try:
        raw = bytes.fromhex(cursor)
    except ValueError:
        raw = b"?"
    if len(raw) not in (0, KEY_BYTES):
        raise ConfigError(f"{cursor!r} is no cursor of this node; start with an empty one")
    return raw
