"""What an operator asks of a pool node and what it answers, as plain values.

Nothing here is on the way of a request: these calls may cost more than the pool's own, so their batches are smaller
(`MAX_INSPECT_KEYS`, `MAX_ADMIN_KEYS`) and every text and list has a bound. Durations travel as durations, never as times of a clock.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_ADMIN_KEYS = 4096
"""Keys in one evict, pin or unpin."""
MAX_INSPECT_KEYS = 512
"""Keys in one inspect."""
MAX_STORY_KEYS = 16
"""Keys in one inspect that asks for stories: a story is searched for, not kept by key."""
MAX_STORY_LINES = 64
"""Story lines in the answer for one key: the latest."""
MAX_HOLDERS = 16
"""Leases, and pins, listed in the answer for one key; their counts are of all."""
MAX_TIERS = 16
"""Tiers of one node."""
MAX_COUNTERS = 256
"""Counters of one tier."""
MAX_QUOTAS = 16_384
"""Tenants in one answer."""
MAX_CORRUPT_KEYS = 4096
"""Corrupt keys listed in one answer of verify; the count is of all."""
MAX_TEXT_CHARS = 256
"""Characters of an owner, a tenant, a name, a reason, a story line, a cursor."""
MAX_PIN_MS = 7 * 24 * 3600 * 1000
"""Longest pin, a week: pin again to hold on."""
MAX_SCRUB_BYTES = 1 << 30
"""Most bytes that one verify call reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlace:
    """A copy of a block in one tier: `length` bytes at `offset` (0 where a tier has no offsets), and how it stands there.

    `state`: of the arena "reserved", "committed" or "doomed"; of a lower tier "stored"; others are shown as they are.
    """

    name: str
    length: int
    offset: int
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """A lease on a block: `kind` is "read", "write" or "hold" (the node's own, for flushes and scrubs)."""

    id: int
    owner: str
    kind: str
    left_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PinHolder:
    """A pin on a block; it ends by itself after `left_ms`."""

    owner: str
    hard: bool
    left_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """All that a node knows of one key; `tiers` is empty when it holds no copy, and then the numbers say nothing.

    `parent` is empty for the first block of a chain. `size` is the bytes taken in the arena, or the frame's length in a lower
    tier. `flags` are those of the frame (`kvpool.block.header.Flags`), `codec` is empty for plain KV. `ttl_left_ms` is None
    without a ttl. `leases` and `pins` list at most `MAX_HOLDERS`, the latest deadlines first; `lease_count` and `pin_count`
    count all. `story` is empty unless asked for: the latest `MAX_STORY_LINES`, oldest first.
    """

    key: bytes
    tiers: tuple[TierPlace, ...] = ()
    parent: bytes = b""
    depth: int = 0
    n_tokens: int = 0
    codec: str = ""
    flags: int = 0
    size: int = 0
    age_ms: int = 0
    idle_ms: int = 0
    hits: int = 0
    ttl_left_ms: int | None = None
    priority: int = 50
    tenant: str = ""
    leases: tuple[LeaseHolder, ...] = ()
    lease_count: int = 0
    pins: tuple[PinHolder, ...] = ()
    pin_count: int = 0
    story: tuple[str, ...] = ()


class EvictOutcome(enum.IntEnum):
    """What became of a block an operator wanted gone from every tier of a node; on a dry run, what would.

    HELD: unlinked at once, so nobody new finds it, but its bytes come back only when the last lease on it ends.
    PINNED: a hard pin keeps it, nothing was done; unpin it first.
    """

    EVICTED = 0
    ABSENT = 1
    HELD = 2
    PINNED = 3


class PinOutcome(enum.IntEnum):
    """What became of one pin. REFUSED: hard pins have reached their share of the node, or the node its number of pins."""

    PINNED = 0
    ABSENT = 1
    REFUSED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A tenant's bytes in the arena, and how many it may have (None: no quota)."""

    tenant: str
    used_bytes: int
    max_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GcReport:
    """What a collection ended and gave back; on a dry run, what it would.

    Leases and blocks past their deadline; `orphan_blocks`, whose head is on this node no longer (they are still right and
    still served, so they are counted, not removed); `dead_bytes`, room that overwritten or removed records still take in
    durable tiers; `reclaimed_bytes`, given back over all tiers.
    """

    expired_leases: int = 0
    expired_blocks: int = 0
    orphan_blocks: int = 0
    orphan_bytes: int = 0
    dead_bytes: int = 0
    reclaimed_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """One step of a scrub: `checked` blocks, `checked_bytes` together, were read; the corrupt among them were dropped.

    `corrupt` lists at most `MAX_CORRUPT_KEYS` of `corrupt_count`. `cursor` goes into the next call; "" when the tier is done.
    """

    checked: int
    checked_bytes: int
    corrupt: tuple[bytes, ...] = ()
    corrupt_count: int = 0
    cursor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """The books of one tier. `state` is "ok", "read-only" or "failed"; `reason` says why it is not ok. `max_objects` 0: no limit."""

    name: str
    state: str
    reason: str
    capacity_bytes: int
    used_bytes: int
    objects: int
    max_objects: int
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """How far a node is with moving blocks to where they belong.

    `state` is its state in the cluster (`kvpool.policy.placement.NodeState`). A round goes over all `blocks` (`block_bytes`) that the node
    holds; `safe_blocks` of them are known to be on all nodes they belong to. `settled`: the last whole round began after the last
    change of the cluster and left nothing to be moved. `counters` are totals since the node's start.
    """

    state: str
    settled: bool
    rounds: int = 0
    blocks: int = 0
    block_bytes: int = 0
    safe_blocks: int = 0
    safe_bytes: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
