"""What goes into a pool's calls and what comes back. Per block these are tuples: a batch makes thousands of them."""

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

from kvpool.block import BlockKey


class Reserve(NamedTuple):
    """A block somebody wants to write: `length` > 0 bytes of frame, `depth` tokens before it in its chain.

    `parent` is the key of the block before it, None for the first of a chain. With `ttl_ns` > 0 the block leaves the pool that
    long after its commit.
    """

    key: BlockKey
    parent: BlockKey | None
    depth: int
    length: int
    ttl_ns: int = 0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Answer to `reserve`: one grant an item, in order. `lease_id` is 0 when nothing was granted."""

    lease_id: int
    grants: tuple[Grant, ...]


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
