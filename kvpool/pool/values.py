"""What goes into a pool's calls and what comes back. Per block these are tuples: a batch makes thousands of them."""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

from kvpool.block import BlockKey
from kvpool.policy.eviction import DEFAULT_PRIORITY


class Reserve(NamedTuple):
    """A block somebody wants to write: `length` > 0 bytes of frame, `depth` tokens before it in its chain.

    `parent` is the key of the block before it, None for the first of a chain. With `ttl_ns` > 0 the block leaves the pool that
    long after its commit. `sequence`: tokens of the whole prompt it was computed for, 0 when unknown. `priority` 0..100 says how long
    it is worth keeping, for `priority_ns` from its commit (0: for ever). Its bytes count against the quota of `tenant`, unless it is
    `near`: a copy for readers close by, beside the pool's own, the first to leave.
    """

    key: BlockKey
    parent: BlockKey | None
    depth: int
    length: int
    ttl_ns: int = 0
    sequence: int = 0
    priority: int = DEFAULT_PRIORITY
    priority_ns: int = 0
    tenant: str = ""
    near: bool = False


class Move(NamedTuple):
    """Copy `size` bytes from offset `source` to offset `target`; the two may overlap, then `target` is the lower one (memmove)."""

    source: int
    target: int
    size: int


class Granted(NamedTuple):
    """Room for a reserved block: write `length` bytes at `offset` of the arena, then commit."""

    offset: int


class Outcome(Enum):
    """Why a reservation got no room."""

    EXISTS = "exists"
    NO_SPACE = "no space"


EXISTS: Final[Literal[Outcome.EXISTS]] = Outcome.EXISTS
"""Committed already, or being written by somebody: success for the caller, nothing to write."""
NO_SPACE: Final[Literal[Outcome.NO_SPACE]] = Outcome.NO_SPACE
"""Everything that may leave is gone, or a limit is reached; the caller goes on without."""

Grant = Granted | Outcome

NEAR: Final = 4
"""What `lookup` says of a block that is here as a near copy only, as the wire spells it (`kvpool.request.pool.NEAR`)."""


class PinOutcome(Enum):
    """What became of the wish to pin one block."""

    PINNED = "pinned"
    ABSENT = "absent"
    REFUSED = "refused"


class Pin(NamedTuple):
    """Somebody's wish to keep a block: soft (evicted last) or hard (not evicted) until `deadline_ns`."""

    owner: str
    hard: bool
    deadline_ns: int


class Holder(NamedTuple):
    """A live lease on a block, as an operator sees it."""

    lease_id: int
    owner: str
    write: bool
    deadline_ns: int


class Quota(NamedTuple):
    """What a tenant's blocks take, and may take at most (None: no limit)."""

    used_bytes: int
    max_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Answer to `reserve`: one grant an item, in order. `lease_id` is 0 when nothing was granted.

    `moves` are copies inside the arena that must be made, in order, and told of by `moved`, before any of the grants is used and before
    anything else is asked of the pool. `waiting`: some item got
    NO_SPACE although room will come when blocks have been written down to a slower tier; ask again then.
    """

    lease_id: int
    grants: tuple[Grant, ...]
    moves: tuple[Move, ...] = ()
    waiting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabGrant:
    """A slab: `nbytes` at `offset` of the arena to write blocks to, one behind the other, each from a multiple of 64 on, then to `carve`.

    `moves` as in `Reserved`.
    """

    lease_id: int
    offset: int
    nbytes: int
    moves: tuple[Move, ...] = ()


class Location(NamedTuple):
    """Where a committed block's frame lies in the arena, in bytes."""

    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Acquired:
    """Answer to `acquire`: one location a key, in order, None for a miss. `lease_id` is 0 when nothing was found."""

    lease_id: int
    found: tuple[Location | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Bytes and counts at one moment; `free + used + pinned == capacity`, in bytes taken, padding included.

    `used` is committed and unleased; `pinned` is reserved, leased or doomed. `blocks` counts committed blocks.
    """

    capacity: int
    free: int
    used: int
    pinned: int
    blocks: int
    read_leases: int
    write_leases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """One committed block as an operator sees it. Times are absolute, on the pool's clock; sizes in bytes, padding included."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    sequence: int
    location: Location
    size: int
    committed_ns: int
    used_ns: int
    hits: int
    expires_ns: int
    priority: int
    priority_until_ns: int
    tenant: str
    dirty: bool
    near: bool
    pins: tuple[Pin, ...]
    holders: tuple[Holder, ...]
