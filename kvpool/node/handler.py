"""A pool node between its protocol core and the wire: adds the clock, the arena's bytes and the checks at the edge.

Everything here runs on one event loop: `PoolState` decides, the arena is memory. Only two calls may wait, within their caller's patience:
`reserve` for blocks to be written down, `acquire` for blocks to come back up (`tiers.py`). Bulk bytes of mapped or one-sided readers
never come through this file; only the gRPC stream of last resort does (`window`).
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from kvpool.block import KEY_BYTES, BlockKey, check_frame
from kvpool.clock import Clock
from kvpool.errors import ConfigError, FrameError
from kvpool.node.near import NearCopies
from kvpool.node.tiers import Found, Tiers
from kvpool.policy.eviction import NEVER_NS
from kvpool.pool import EXISTS, BlockView, Granted, PoolState, Reserve, Reserved, SlabGrant
from kvpool.pool import Outcome as PoolOutcome
from kvpool.pool.flow import FlowSettings
from kvpool.request.pool import (
    DEFAULT_PRIORITY,
    NEAR,
    Grant,
    NodeDescription,
    Outcome,
    Place,
    Reservation,
    ShmOffer,
    Stored,
    TcpOffer,
    UcxOffer,
)
from kvpool.tier import Arena
from kvpool.units import MS, SECOND
from kvpool.wire.fence import NodeIdentity

log = logging.getLogger(__name__)

GRANTED: Final = Outcome.GRANTED
EXISTING: Final = (Outcome.EXISTS, 0)
REFUSED: Final = (Outcome.NO_SPACE, 0)


class NodeHandler:
    """`PoolHandler` of one node: `state` over `arena`."""

    def __init__(
        self,
        state: PoolState,
        arena: Arena,
        clock: Clock,
        *,
        node_id: str,
        incarnation: int,
        grpc_data: bool = True,
        tiers: Tiers | None = None,
    ) -> None:
        self.identity = NodeIdentity(node_id, incarnation)
        self._state = state
        self._arena = arena
        self._clock = clock
        self._tiers = tiers or Tiers(state, arena, clock, below=None, beside=None, settings=FlowSettings())
        self._grpc_data = grpc_data
        self._corrupt = 0
        self.shm: ShmOffer | None = None
        self.ucx: Callable[[], UcxOffer | None] = lambda: None  # asked each time: the data plane may have been restarted
        self.tcp: Callable[[], TcpOffer | None] = lambda: None
        self.near: NearCopies | None = None
        """Fetches what other nodes hold; without it (no cluster) `fetch_from` finds nothing."""
        self.leaving: Callable[[], bool] = lambda: False
        """Whether nothing may be written here any more."""
        self.counted: Callable[[], dict[str, int]] = dict
        self.counted_here: Callable[[], dict[str, int]] = dict
        """What clients on this host do."""
        self.on_read: Callable[[Sequence[BlockKey]], None] = lambda keys: None

    def describe(self) -> NodeDescription:
        """Identity, books, counters and offers."""
        books = self._state.books()
        return NodeDescription(
            node_id=self.identity.node_id,
            incarnation=self.identity.incarnation,
            capacity_bytes=books.capacity,
            free_bytes=books.free,
            used_bytes=books.used,
            pinned_bytes=books.pinned,
            blocks=books.blocks,
            read_leases=books.read_leases,
            write_leases=books.write_leases,
            counters={**self._state.counters(), **self._tiers.counted(), **self.counted(), **self.counted_here(), "corrupt": self._corrupt},
            shm=self.shm,
            ucx=self.ucx(),
            tcp=self.tcp(),
            grpc_data=self._grpc_data,
        )

    def lookup(self, keys: Sequence[bytes]) -> bytes:
        """One byte a key: where it is, 0 when nowhere."""
        wanted = _keys(keys)
        return self._tiers.present(wanted, self._state.lookup(wanted, self._clock.now_ns()))

    async def reserve(
        self,
        owner: str,
        lease_ms: int,
        blocks: Sequence[Reservation],
        *,
        sequence: int = 0,
        tenant: str = "",
        near: bool = False,
        patience_s: float = 0.0,
    ) -> tuple[int, list[Grant]]:
        """Room for `blocks`; the parent of a first block is empty. What a slower tier has needs no writing either: EXISTS.

        Nor does what is here as a near copy: it becomes a block like any other, unless a `near` one is all that is wanted. A node that
        leaves takes nothing more.
        """
        if self.leaving():
            return 0, self._closed_to(blocks)
        items, lower = self._wanted(blocks, sequence, tenant, near=near)
        answer = await self._tiers.reserve(
            [item for item, found in zip(items, lower, strict=True) if found is None],
            owner=owner,
            lease_ns=lease_ms * MS,
            deadline_ns=self._deadline(patience_s),
        )
        return answer.lease_id, _grants(answer, lower)

    def reserve_now(
        self, owner: str, lease_ns: int, blocks: Sequence[Reservation], *, sequence: int, tenant: str, near: bool
    ) -> tuple[int, list[Grant], bool]:
        """As `reserve`, without patience; the last says whether room will come when blocks have been written down."""
        if self.leaving():
            return 0, self._closed_to(blocks), False
        items, lower = self._wanted(blocks, sequence, tenant, near=near)
        missing = [item for item, found in zip(items, lower, strict=True) if found is None]
        answer = self._tiers.reserve_now(missing, owner=owner, lease_ns=lease_ns)
        return answer.lease_id, _grants(answer, lower), answer.waiting

    def commit(self, lease_id: int, keys: Sequence[bytes], *, unverified: bool = True) -> list[bool]:
        """Publish. `unverified`: the bytes may have come over a wire, and nobody has checked them since."""
        wanted = _keys(keys)
        done = self._state.commit(lease_id, wanted, self._clock.now_ns(), unverified=unverified)
        self._tiers.committed([key for key, ok in zip(wanted, done, strict=True) if ok])
        return list(done)

    def slab(self, owner: str, lease_ns: int, nbytes: int) -> SlabGrant | None:
        """Room in advance; None when there is none now, or nothing may be written here any more."""
        return None if self.leaving() else self._tiers.slab_now(nbytes, owner=owner, lease_ns=lease_ns)

    def put(self, lease_id: int, blocks: Sequence[Reservation], *, sequence: int, tenant: str) -> list[Outcome]:
        """Publish what was written to the front of a slab; the same is EXISTS and NO_SPACE as for `reserve`.

        What the tier below has is EXISTS, and as its bytes are here anyway it stays in memory, too. A node that leaves takes nothing more.
        What is left of the slab stays the writer's, who may be writing there already.
        """
        if self.leaving():
            self._state.carve(lease_id, _items(blocks, sequence, tenant), self._clock.now_ns(), closed=True)
            return [outcome for outcome, _ in self._closed_to(blocks)]
        items, lower = self._wanted(blocks, sequence, tenant, near=False)
        grants = self._state.carve(lease_id, items, self._clock.now_ns())
        came = [item.key for item, grant in zip(items, grants, strict=True) if isinstance(grant, Granted)]
        outcomes = [outcome for outcome, _ in _told(grants)]
        if any(lower):
            outcomes = [outcome if found is None else Outcome.EXISTS for outcome, found in zip(outcomes, lower, strict=True)]
            clean = {item.key for item, found in zip(items, lower, strict=True) if found is not None and found.tier is self._tiers.below}
            self._state.mark([key for key in came if key in clean], dirty=False)
            came = [key for key in came if key not in clean]
        self._tiers.committed(came)
        return outcomes

    def _closed_to(self, blocks: Sequence[Reservation]) -> list[Grant]:
        """What a node that takes nothing more says."""
        return [(Outcome.NO_SPACE if there in (0, NEAR) else Outcome.EXISTS, 0) for there in self.lookup([b.key for b in blocks])]

    def _wanted(self, blocks: Sequence[Reservation], sequence: int, tenant: str, *, near: bool) -> tuple[list[Reserve], list[Found | None]]:
        """The blocks as the pool takes them, and where else than in the arena each is already. Near copies are adopted."""
        items = _items(blocks, sequence, tenant, near=near)
        keys = [item.key for item in items]
        if not near:
            self.adopt(keys)
        return items, self._tiers.find(keys)

    def adopt(self, keys: Sequence[BlockKey]) -> None:
        """This node is to hold these blocks in its own right, if they are here as near copies."""
        adopted = self._state.adopt(keys, self._clock.now_ns())
        if adopted:
            self._tiers.committed(adopted)

    async def acquire(
        self,
        owner: str,
        lease_ms: int,
        keys: Sequence[bytes],
        *,
        sequence: int = 0,
        patience_s: float = 0.0,
        fetch_from: Sequence[str] = (),
    ) -> tuple[int, list[Place | None]]:
        """Lease what is there, once what other tiers hold of it has been brought into the arena, and what is nowhere here was fetched
        from the nodes `fetch_from` as near copies."""
        wanted, held = _keys(keys), 0
        missing = [key for key in wanted if self._state.locate(key) is None]
        elsewhere = bool(missing) and (self._fetches(fetch_from) or self._tiers.has_any(missing))
        if elsewhere:  # what is here already must not leave for what comes
            lease_ns = int(patience_s * SECOND) + SECOND
            held = self._state.hold(wanted, owner=owner, lease_ns=lease_ns, now_ns=self._clock.now_ns()).lease_id
        try:
            if elsewhere:
                deadline_ns = self._deadline(patience_s)
                await self._tiers.bring(missing, deadline_ns)
                if self.near is not None and fetch_from:
                    await self.near.fetch([key for key in missing if self._state.locate(key) is None], fetch_from, deadline_ns)
            answer = self._state.acquire(wanted, owner=owner, lease_ns=lease_ms * MS, now_ns=self._clock.now_ns(), sequence=sequence)
        finally:
            if held:
                self._state.release(held, self._clock.now_ns())
        found = [key for key, place in zip(wanted, answer.found, strict=True) if place is not None]
        self._tiers.used(found)
        self.on_read(found)
        return answer.lease_id, list(answer.found)

    def stored(self, keys: Sequence[bytes]) -> list[Stored | None]:
        """What it takes to store these blocks elsewhere, of those in the arena."""
        return [stored_block(self._state.view(key), self._clock.now_ns()) for key in _keys(keys)]

    def renew(self, lease_id: int, lease_ms: int) -> bool:
        """Move a lease's deadline."""
        return self._state.renew(lease_id, lease_ms * MS, self._clock.now_ns())

    def release(self, lease_id: int, suspect: Sequence[bytes]) -> None:
        """End a lease; look at suspects first, while the lease still holds them in place."""
        for key in _keys(suspect):
            self.examine(key)
        self._state.release(lease_id, self._clock.now_ns())

    def window(self, lease_id: int, offset: int, length: int, *, write: bool) -> npt.NDArray[np.uint8]:
        """The arena's bytes in a range that the lease covers. `ConfigError` when it doesn't, or gRPC data is not offered."""
        if not self._grpc_data:
            raise ConfigError("this node does not move bytes over gRPC; start it with --offer grpc")
        if not self._state.leased_ranges(lease_id, [(offset, length)], write=write):
            right = "write" if write else "read"
            raise ConfigError(f"range {offset}+{length} is not covered by lease {lease_id} to {right}; it may have ended")
        return self._arena.view(offset, length)

    def tick(self) -> None:
        """End what has run out."""
        self._state.tick(self._clock.now_ns())

    def drop_damaged(self, key: BlockKey) -> None:
        """A block is damaged: counted, and gone from every tier, since what was written down may have been copied from it."""
        self._corrupt += 1
        self._state.discard(key)
        self._tiers.forget([key])

    def _fetches(self, fetch_from: Sequence[str]) -> bool:
        return self.near is not None and bool(fetch_from)

    def _deadline(self, patience_s: float) -> int:
        return self._clock.now_ns() + int(patience_s * SECOND)

    def examine(self, key: BlockKey) -> None:
        """Drop the block of `key` if its frame is damaged. The reader may be wrong (its lease had ended): look for ourselves."""
        place = self._state.locate(key)
        if place is None:
            return
        try:
            check_frame(self._arena.view(place.offset, place.length), key)
        except FrameError as error:
            log.error("block %s is damaged in the arena and dropped: %s", key.hex()[:16], error)
            self.drop_damaged(key)


def stored_block(view: BlockView | None, now_ns: int) -> Stored | None:
    """A block of the arena as the wire tells it."""
    if view is None:
        return None
    offset, length = view.location
    ttl_ms = 0 if view.expires_ns == NEVER_NS else max(1, (view.expires_ns - now_ns) // MS)
    priority, priority_ms = view.priority, 0
    if view.priority_until_ns != NEVER_NS:
        left_ms = (view.priority_until_ns - now_ns) // MS
        priority, priority_ms = (priority, left_ms) if left_ms > 0 else (DEFAULT_PRIORITY, 0)
    return Stored(offset, length, view.parent or b"", view.depth, ttl_ms, view.sequence, view.tenant, priority, priority_ms)


def _items(blocks: Sequence[Reservation], sequence: int, tenant: str, *, near: bool = False) -> list[Reserve]:
    """The blocks as the pool takes them."""
    keys, parents = _keys([block.key for block in blocks]), _keys([block.parent for block in blocks], or_none=True)
    return [
        Reserve(key, parent or None, depth, length, ttl_ms * MS, sequence, priority, priority_ms * MS, tenant, near)
        for key, parent, (_, _, depth, length, ttl_ms, priority, priority_ms) in zip(keys, parents, blocks, strict=True)
    ]


def _told(grants: Iterable[Granted | PoolOutcome]) -> list[Grant]:
    """What the pool answered, as it is told."""
    return [(GRANTED, grant.offset) if isinstance(grant, Granted) else (EXISTING if grant is EXISTS else REFUSED) for grant in grants]


def _grants(answer: Reserved, lower: Sequence[Found | None]) -> list[Grant]:
    """One a block, of which the pool was asked for those that are nowhere lower."""
    grants = _told(answer.grants)
    if len(grants) == len(lower):
        return grants
    told = iter(grants)
    return [next(told) if found is None else EXISTING for found in lower]


def _keys(raw: Sequence[bytes], *, or_none: bool = False) -> list[BlockKey]:
    """Keys as the pool takes them, once their lengths are known to be right; with `or_none` some may be empty."""
    lengths = set(map(len, raw)) - {KEY_BYTES, 0 if or_none else KEY_BYTES}
    if lengths:
        raise ConfigError(f"a block key has {KEY_BYTES} bytes, got {min(lengths)}")
    return cast("list[BlockKey]", list(raw))
