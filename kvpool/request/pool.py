"""What is asked of a pool node and what it answers, as plain values.

Calls carry batches; per block these are tuples, because a thousand small objects would cost more than the answer.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmOffer:
    """A node's arena as a file that processes of its host (same boot id) may map, and the socket for what they ask of it ("": none)."""

    path: str
    boot_id: str
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxOffer:
    """What a UCX peer needs for one-sided access: the worker's address, the packed rkey, the memory's base and length."""

    worker_address: bytes
    rkey: bytes
    base_address: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpOffer:
    """Where a node's bytes are to be had by plain TCP (`kvpool.transport.tcp`): host:port."""

    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDescription:
    """Who a node is, its books (bytes; `free + used + pinned == capacity`) and how its bytes can be reached."""

    node_id: str
    incarnation: int
    capacity_bytes: int
    free_bytes: int
    used_bytes: int
    pinned_bytes: int
    blocks: int
    read_leases: int
    write_leases: int
    counters: dict[str, int] = field(default_factory=dict)
    shm: ShmOffer | None = None
    ucx: UcxOffer | None = None
    tcp: TcpOffer | None = None
    grpc_data: bool = True


DEFAULT_PRIORITY = 50
"""The priority of a block nobody gave one, in 0..100."""


class Reservation(NamedTuple):
    """A block somebody wants to write. `parent`: b"" for the first of a chain; `depth`: tokens before it; `length`: bytes of its frame.

    `ttl_ms`: 0 for none. `priority`: 0..100, a higher one stays longer, for `priority_ms` from its commit on (0: for ever).
    """

    key: bytes
    parent: bytes
    depth: int
    length: int
    ttl_ms: int = 0
    priority: int = DEFAULT_PRIORITY
    priority_ms: int = 0


class Outcome(enum.IntEnum):
    """What became of one reservation."""

    GRANTED = 0
    EXISTS = 1
    NO_SPACE = 2


Grant = tuple[Outcome, int]
"""(outcome, offset; meaningful when GRANTED)."""

Place = tuple[int, int]
"""(offset, length) of a stored frame in the arena's data region."""


class Slab(NamedTuple):
    """Room of the arena that a client on the same host was given in advance, to carve small blocks from its front."""

    lease_id: int
    offset: int
    nbytes: int


class Stored(NamedTuple):
    """A leased block with all that it takes to store it elsewhere: where it lies, and what it was reserved with.

    `ttl_ms` and `priority_ms` are what is left of them (0: none, and for ever); the rest as in `Reservation` and `PoolRpc.reserve`.
    """

    offset: int
    length: int
    parent: bytes
    depth: int
    ttl_ms: int = 0
    sequence: int = 0
    tenant: str = ""
    priority: int = DEFAULT_PRIORITY
    priority_ms: int = 0

    @property
    def place(self) -> Place:
        """Where it lies."""
        return self.offset, self.length


NEAR = 4
"""What `lookup` says of a block that is here as a near copy only: it leaves first, and doesn't count as one of the pool's copies."""
