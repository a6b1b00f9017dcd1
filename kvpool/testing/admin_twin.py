"""An `AdminHandler` in memory: what operators' tools are tested against, held to the contract of `admin_kit.py`.

One tier, "arena"; `put`, `lease` and `damage` are what clients and bad luck do to a real node. Time is a `Clock`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from kvpool.block import BlockKey
from kvpool.block.header import Flags
from kvpool.clock import Clock, MonotonicClock
from kvpool.errors import ConfigError
from kvpool.request import admin as a
from kvpool.units import MIB, MS
from kvpool.wire.fence import NodeIdentity

TIER = "arena"


@dataclass(slots=True, kw_only=True)
class TwinBlock:
    """A block of the twin. `leases`: id -> (owner, deadline); `pins`: owner -> (hard, deadline); deadlines in ns."""

    length: int
    parent: bytes
    depth: int
    n_tokens: int
    tenant: str
    stored_ns: int
    expires_ns: int | None = None
    damaged: bool = False
    leases: dict[int, tuple[str, int]] = field(default_factory=dict)
    pins: dict[str, tuple[bool, int]] = field(default_factory=dict)


class MemoryAdmin:
    """The twin. Hard pins take at most half of `capacity_bytes`; what is beyond is refused."""

    def __init__(self, identity: NodeIdentity, *, capacity_bytes: int = 64 * MIB, clock: Clock | None = None) -> None:
        self.identity = identity
        self.blocks: dict[BlockKey, TwinBlock] = {}
        self.tier_state, self.tier_reason = "ok", ""
        self._capacity_bytes = capacity_bytes
        self._clock = clock or MonotonicClock()
        self._doomed: list[TwinBlock] = []
        self._quotas: dict[str, int] = {}
        self._stories: dict[BlockKey, list[str]] = {}
        self._lease_ids = count(1)
        self._corrupt = 0
        self.state = "active"
        self.moved: set[BlockKey] = set()
        """Blocks that other nodes have too: what a drain waits for."""
        self.homeless: set[BlockKey] = set()
        """Blocks that no other node has room for: a drain doesn't wait for them."""
        self.adrift = 0
        """How many of these lie behind a gap in their chain."""

    # What clients and bad luck do

    def put(
        self,
        keys: Sequence[bytes],
        *,
        parent: bytes = b"",
        depth: int = 0,
        length: int = 4096,
        n_tokens: int = 16,
        tenant: str = "",
        ttl_ms: int | None = None,
    ) -> None:
        """Store a chain, or the part of one that goes on after `depth` tokens behind the block `parent`."""
        now_ns = self._clock.now_ns()
        for index, key in enumerate(map(BlockKey, keys)):
            self.blocks[key] = TwinBlock(
                length=length,
                parent=parent,
                depth=depth + index * n_tokens,
                n_tokens=n_tokens,
                tenant=tenant,
                stored_ns=now_ns,
                expires_ns=None if ttl_ms is None else now_ns + ttl_ms * MS,
            )
            self._tell(key, "committed")
            parent = key

    def lease(self, keys: Sequence[bytes], owner: str, *, lease_ms: int = 60_000) -> int:
        """Read-lease what is there; the lease's id."""
        lease_id, until_ns = next(self._lease_ids), self._clock.now_ns() + lease_ms * MS
        for key in map(BlockKey, keys):
            if key in self.blocks:
                self.blocks[key].leases[lease_id] = (owner, until_ns)
        return lease_id

    def release(self, lease_id: int) -> None:
        """End a lease."""
        for block in (*self.blocks.values(), *self._doomed):
            block.leases.pop(lease_id, None)
        self._settle()

    def damage(self, key: bytes) -> None:
        """Flip a bit of a block."""
        self.blocks[BlockKey(key)].damaged = True

    # AdminHandler

    async def inspect(self, keys: Sequence[BlockKey], *, story: bool) -> list[a.Inspection]:
        """What is known of each key."""
        self._settle()
        return [self._inspection(key, tuple(self._stories.get(key, ())) if story else ()) for key in keys]

    async def evict(self, keys: Sequence[BlockKey], *, dry_run: bool) -> list[a.EvictOutcome]:
        """Unlink blocks that no hard pin keeps."""
        self._settle()
        return [self._evict(key, dry_run) for key in keys]

    async def pin(self, keys: Sequence[BlockKey], *, hard: bool, duration_ms: int, owner: str) -> list[a.PinOutcome]:
        """Pin what is there and fits the share of hard pins."""
        self._settle()
        return [self._pin(key, hard, self._clock.now_ns() + duration_ms * MS, owner) for key in keys]

    async def unpin(self, keys: Sequence[BlockKey], *, owner: str) -> int:
        """End the owner's pins."""
        self._settle()
        return sum(self.blocks[key].pins.pop(owner, None) is not None for key in keys if key in self.blocks)

    async def set_quota(self, tenant: str, max_bytes: int) -> None:
        """Set or, with 0, remove."""
        self._quotas.pop(tenant, None)
        if max_bytes:
            self._quotas[tenant] = max_bytes

    async def quotas(self) -> list[a.Quota]:
        """Tenants with blocks or a quota."""
        used: dict[str, int] = dict.fromkeys(self._quotas, 0)
        for block in self.blocks.values():
            used[block.tenant] = used.get(block.tenant, 0) + block.length
        return [a.Quota(tenant=name, used_bytes=used[name], max_bytes=self._quotas.get(name)) for name in sorted(used)]

    async def gc(self, *, dry_run: bool) -> a.GcReport:
        """Remove expired blocks and end expired leases."""
        now_ns = self._clock.now_ns()
        expired = [key for key, block in self.blocks.items() if block.expires_ns is not None and block.expires_ns <= now_ns]
        leases = {lease for block in self.blocks.values() for lease, (_, until_ns) in block.leases.items() if until_ns <= now_ns}
        orphans = [block for block in self.blocks.values() if block.parent and block.parent not in self.blocks]
        freed = sum(self.blocks[key].length for key in expired)
        if not dry_run:
            for key in expired:
                self._unlink(key, "expired")
            self._settle()
        return a.GcReport(
            expired_leases=len(leases),
            expired_blocks=len(expired),
            orphan_blocks=len(orphans),
            orphan_bytes=sum(block.length for block in orphans),
            reclaimed_bytes=freed,
        )

    async def verify(self, tier: str, *, cursor: str, max_bytes: int) -> a.VerifyReport:
        """Check blocks in the order of their keys; the cursor is the last one checked."""
        if tier != TIER:
            raise ConfigError(f"no tier {tier!r} here; there is {TIER}")
        waiting = sorted(key for key in self.blocks if key.hex() > cursor)
        checked: list[BlockKey] = []
        nbytes = 0
        for key in waiting:
            if checked and nbytes + self.blocks[key].length > max_bytes:
                break
            checked.append(key)
            nbytes += self.blocks[key].length
        corrupt = tuple(key for key in checked if self.blocks[key].damaged)
        for key in corrupt:
            self._unlink(key, "corrupt")
        self._corrupt += len(corrupt)
        end = checked[-1].hex() if len(checked) < len(waiting) else ""
        return a.VerifyReport(checked=len(checked), checked_bytes=nbytes, corrupt=corrupt, corrupt_count=len(corrupt), cursor=end)

    async def tiers(self) -> list[a.TierReport]:
        """The one tier."""
        self._settle()
        return [
            a.TierReport(
                name=TIER,
                state=self.tier_state,
                reason=self.tier_reason,
                capacity_bytes=self._capacity_bytes,
                used_bytes=sum(block.length for block in (*self.blocks.values(), *self._doomed)),
                objects=len(self.blocks),
                max_objects=0,
                counters={"corrupt": self._corrupt},
            )
        ]

    async def drain(self, *, cancel: bool, bytes_per_s: int) -> a.Balance:
        """Change the state; moving is what the test does, by `moved`."""
        self.state = "active" if cancel else "draining"
        return await self.balance()

    async def balance(self) -> a.Balance:
        """Safe is what was `moved`; settled when all was that can be, or the state asks for no move."""
        safe = [block for key, block in self.blocks.items() if self.state == "active" or key in self.moved]
        return a.Balance(
            state=self.state,
            settled=self.state == "active" or self.blocks.keys() <= self.moved | self.homeless,
            rounds=1,
            blocks=len(self.blocks),
            block_bytes=sum(block.length for block in self.blocks.values()),
            safe_blocks=len(safe),
            safe_bytes=sum(block.length for block in safe),
            counters={"adrift": self.adrift},
        )

    def _inspection(self, key: BlockKey, story: tuple[str, ...]) -> a.Inspection:
        block, now_ns = self.blocks.get(key), self._clock.now_ns()
        if block is None:
            return a.Inspection(key=key, story=story)
        leases = [a.LeaseHolder(id=i, owner=owner, kind="read", left_ms=(t - now_ns) // MS) for i, (owner, t) in block.leases.items()]
        pins = [a.PinHolder(owner=owner, hard=hard, left_ms=(t - now_ns) // MS) for owner, (hard, t) in block.pins.items()]
        age_ms = (now_ns - block.stored_ns) // MS
        return a.Inspection(
            key=key,
            tiers=(a.TierPlace(name=TIER, length=block.length, offset=0, state="committed"),),
            parent=block.parent,
            depth=block.depth,
            n_tokens=block.n_tokens,
            flags=Flags.PURE,
            size=block.length,
            age_ms=age_ms,
            idle_ms=age_ms,
            ttl_left_ms=None if block.expires_ns is None else max(0, block.expires_ns - now_ns) // MS,
            tenant=block.tenant,
            leases=tuple(leases),
            lease_count=len(leases),
            pins=tuple(pins),
            pin_count=len(pins),
            story=story,
        )

    def _evict(self, key: BlockKey, dry_run: bool) -> a.EvictOutcome:
        block = self.blocks.get(key)
        if block is None:
            return a.EvictOutcome.ABSENT
        if any(hard for hard, _ in block.pins.values()):
            return a.EvictOutcome.PINNED
        if not dry_run:
            self._unlink(key, "evicted")
        return a.EvictOutcome.HELD if block.leases else a.EvictOutcome.EVICTED

    def _pin(self, key: BlockKey, hard: bool, until_ns: int, owner: str) -> a.PinOutcome:
        block = self.blocks.get(key)
        if block is None:
            return a.PinOutcome.ABSENT
        hard_bytes = sum(other.length for other in self.blocks.values() if other is not block and any(h for h, _ in other.pins.values()))
        if hard and 2 * (hard_bytes + block.length) > self._capacity_bytes:
            return a.PinOutcome.REFUSED
        block.pins[owner] = (hard, until_ns)
        self._tell(key, f"pinned by {owner}")
        return a.PinOutcome.PINNED

    def _unlink(self, key: BlockKey, why: str) -> None:
        block = self.blocks.pop(key)
        if block.leases:
            self._doomed.append(block)
        self._tell(key, why)

    def _settle(self) -> None:
        """Let leases and pins end whose time is over, and with them the blocks that only they held."""
        now_ns = self._clock.now_ns()
        for block in (*self.blocks.values(), *self._doomed):
            block.leases = {lease: held for lease, held in block.leases.items() if held[1] > now_ns}
            block.pins = {owner: pin for owner, pin in block.pins.items() if pin[1] > now_ns}
        self._doomed = [block for block in self._doomed if block.leases]

    def _tell(self, key: BlockKey, event: str) -> None:
        self._stories.setdefault(key, []).append(f"{self._clock.now_ns()} ns: {event}")
