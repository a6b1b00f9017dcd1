"""What clients on a node's own host may do and hold: sessions, their leases and slabs, and the cells by which they read from the board.

Theory. A session (`kvpool.wire.session`) lives exactly as long as its socket, and so does all that it holds. Its leases are renewed for
it: one that ran out under a living writer would let two write to the same bytes. Everything is answered at once: what would have to wait
is refused, and the client asks by gRPC, which waits.

When the client closes its socket, or the kernel does after its process, all of it goes at once, because nobody writes or looks any more.
When the *node* ends a session, the process at its other end may still be at work. So what it held stays for `PoolLimits.fence_ns`.

Readers of the board ask nobody and leave *touches* in their cells. `settle` collects them: for the order of eviction, the tiers and the
hot extents they are uses like any other.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvpool.block import BlockKey
from kvpool.clock import Clock
from kvpool.errors import ConfigError
from kvpool.node.handler import NodeHandler
from kvpool.node.tiers import Tiers
from kvpool.node.verifier import Verifier
from kvpool.policy.eviction import NEVER_NS
from kvpool.pool import PoolState
from kvpool.pool.allocator import aligned
from kvpool.pool.resident import Resident
from kvpool.request.pool import Outcome
from kvpool.tier.board import Board, Flag
from kvpool.units import SECOND
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.session import Answer, Kind, Request
from kvpool.wire.session_server import SessionCalls

log = logging.getLogger(__name__)

MAX_LEASES: Final = 64
"""Leases of one session, slabs included."""
SLAB_SHARE: Final = 8
"""A session's slabs take at most this part of the arena, those of all sessions half of it."""
LEASE_NS: Final = 600 * SECOND
_RENEW_NS: Final = 10 * SECOND
_TOUCHES: Final = 512
_OWNER_CHARS: Final = 200
_GRANTED: Final = int(Outcome.GRANTED)
_UNVERIFIED: Final = int(Flag.UNVERIFIED)


class Announced:
    """A board as the pool tells it (`kvpool.pool.announcer`)."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.withdraw, self.held, self.watched, self.verified = board.withdraw_all, board.held, board.watched, board.verified

    def publish(self, blocks: Sequence[Resident]) -> None:
        """Readers find these blocks from now on."""
        self._board.publish_all(
            [(b.key, *b.location, 0 if b.expires_ns == NEVER_NS else b.expires_ns, _UNVERIFIED if b.unverified else 0) for b in blocks]
        )


class NodeSession:
    """One client: `SessionCalls`."""

    def __init__(self, host: "Sessions", owner: str, cell: int) -> None:
        self._host = host
        self.owner = owner
        self.cell = cell
        self.writes: dict[int, set[bytes]] = {}
        """Keys reserved and not committed, by lease."""
        self.slabs: dict[int, int] = {}
        """Bytes left of each slab, by lease."""

    def serve(self, request: Request) -> Answer:
        """Answer at once."""
        match request.kind:
            case Kind.SLAB:
                return self._slab(request.nbytes)
            case Kind.PUT:
                return self._put(request)
            case Kind.RESERVE:
                return self._reserve(request)
            case Kind.COMMIT:
                return self._commit(request)
            case Kind.RELEASE:
                return self._release(request)

    def end(self, *, gone: bool) -> None:
        """The socket is no more."""
        self._host.ended(self, gone=gone)

    def leases(self) -> Iterator[int]:
        """Ids of all it has."""
        yield from self.writes
        yield from self.slabs

    @property
    def _full(self) -> bool:
        return len(self.writes) + len(self.slabs) >= MAX_LEASES

    def _slab(self, nbytes: int) -> Answer:
        if not nbytes:
            raise ConfigError("a slab has at least one byte")
        host = self._host
        if self._full or not host.allows(sum(self.slabs.values()), aligned(nbytes)):
            return Answer()
        grant = host.handler.slab(self.owner, host.lease_ns, nbytes)
        if grant is None:
            return Answer()
        self.slabs[grant.lease_id] = grant.nbytes
        host.slab_bytes += grant.nbytes
        return Answer(grant.lease_id, grant.offset, grant.nbytes)

    def _put(self, request: Request) -> Answer:
        lease_id, blocks = request.lease_id, request.blocks
        if lease_id in self.slabs:
            outcomes = self._host.handler.put(lease_id, blocks, sequence=request.sequence, tenant=request.tenant)
            self._used(lease_id, sum(aligned(block.length) for block in blocks))
        else:
            outcomes = [Outcome.NO_SPACE] * len(blocks)
        following = self._slab(request.nbytes) if request.nbytes else Answer()
        return following._replace(outcomes=bytes(outcomes))

    def _used(self, lease_id: int, nbytes: int) -> None:
        """So much of a slab is gone; with its last byte its lease is over."""
        left = self.slabs.pop(lease_id) - nbytes
        self._host.slab_bytes -= nbytes
        if left:
            self.slabs[lease_id] = left

    def _reserve(self, request: Request) -> Answer:
        blocks = request.blocks
        if self._full:
            return Answer(outcomes=bytes([Outcome.NO_SPACE]) * len(blocks), offsets=(0,) * len(blocks))
        lease_id, grants, waiting = self._host.handler.reserve_now(
            self.owner, self._host.lease_ns, blocks, sequence=request.sequence, tenant=request.tenant, near=request.near
        )
        outcomes, offsets = bytes([outcome for outcome, _ in grants]), [offset for _, offset in grants]
        if lease_id:
            self.writes[lease_id] = {block.key for block, outcome in zip(blocks, outcomes, strict=True) if outcome == _GRANTED}
        return Answer(lease_id, outcomes=outcomes, offsets=offsets, waiting=waiting)

    def _commit(self, request: Request) -> Answer:
        lease_id, keys = request.lease_id, request.keys
        left = self.writes.get(lease_id)
        if left is None:
            return Answer(outcomes=bytes(len(keys)))
        done = self._host.handler.commit(lease_id, keys, unverified=False)
        left.difference_update(keys)
        if not left:
            del self.writes[lease_id]
        return Answer(outcomes=bytes(done))

    def _release(self, request: Request) -> Answer:
        lease_id = request.lease_id
        ours = self.writes.pop(lease_id, None) is not None
        if lease_id in self.slabs:
            self._host.slab_bytes -= self.slabs.pop(lease_id)
            ours = True
        self._host.handler.release(lease_id if ours else 0, request.keys)
        return Answer()


class Sessions:
    """The sessions of one node: `SessionHost`. On the event loop; `tick` and `settle` are called now and then."""

    def __init__(self, handler: NodeHandler, state: PoolState, tiers: Tiers, board: Board, clock: Clock, capacity: int) -> None:
        self.handler = handler
        self.board_fd = board.read_fd
        self.lease_ns = min(LEASE_NS, state.limits.max_lease_ns)
        self.slab_bytes = 0
        """Of all sessions."""
        self.verifier: Verifier | None = None
        """Checks what is used and nobody has checked."""
        self.drop: Callable[[SessionCalls, str], None] = lambda session, why: None
        """Ends a session's socket (`SessionServer.drop`)."""
        self._state = state
        self._tiers = tiers
        self._board = board
        self._clock = clock
        self._capacity = capacity
        self._open: dict[NodeSession, None] = {}
        self._fenced: deque[tuple[int, NodeSession]] = deque()
        self._renewed_ns = 0

    @property
    def identity(self) -> NodeIdentity:
        """Who answers."""
        return self.handler.identity

    def open(self, owner: str, pid: int, cell_fd: int) -> NodeSession:
        """Take a client in. Raises `ConfigError` when what it passed is no cell."""
        session = NodeSession(self, f"{owner[:_OWNER_CHARS]} ({pid})", self._board.attach(cell_fd))
        self._open[session] = None
        return session

    def ended(self, session: NodeSession, *, gone: bool) -> None:
        """A socket is no more; `gone`: nor is whoever wrote and looked."""
        del self._open[session]
        fence_ns = 0 if gone else self._state.limits.fence_ns
        if fence_ns:
            self._fenced.append((self._clock.now_ns() + fence_ns, session))
        else:
            self._let_go(session)

    def allows(self, has: int, more: int) -> bool:
        """Whether a session that has slabs of so many bytes may have `more`."""
        return has + more <= self._capacity // SLAB_SHARE and self.slab_bytes + more <= self._capacity // 2

    def tick(self) -> None:
        """Renew what living sessions hold, let go of what was kept behind a fence. To come before the pool's own tick."""
        now_ns = self._clock.now_ns()
        while self._fenced and self._fenced[0][0] <= now_ns:
            self._let_go(self._fenced.popleft()[1])
        if now_ns - self._renewed_ns >= min(_RENEW_NS, self.lease_ns // 4):
            self._renewed_ns = now_ns
            for session in list(self._open):
                self._renew(session, now_ns)

    def settle(self) -> bool:
        """Take in some of what readers of the board have used; whether there may be more."""
        keys = self._board.touched(_TOUCHES)
        if keys:
            self._state.touch(keys, self._clock.now_ns())
            self._tiers.used(keys)
            if self.verifier is not None:
                self.verifier.used(keys)
            for chain in self._chains(keys):
                self.handler.on_read(chain)
        return bool(keys)  # less than asked for may have been some that are gone

    def counted(self) -> dict[str, int]:
        """Now: sessions, their leases, bytes of slabs, holds over all cells. Since the start: blocks verified, the board's counters."""
        return {
            "sessions": len(self._open),
            "session_leases": sum(len(session.writes) + len(session.slabs) for session in self._open),
            "slab_bytes": self.slab_bytes,
            "holds": self._board.holding(),
            "verified": 0 if self.verifier is None else self.verifier.checked,
            **self._board.counters,
        }

    def _renew(self, session: NodeSession, now_ns: int) -> None:
        alive = [self._state.renew(lease_id, self.lease_ns, now_ns) for lease_id in session.leases()]
        if not all(alive):
            self.drop(session, "a lease of it ran out while this node stood still")

    def _let_go(self, session: NodeSession) -> None:
        now_ns = self._clock.now_ns()
        for lease_id in session.leases():
            self._state.release(lease_id, now_ns)
        self.slab_bytes -= sum(session.slabs.values())
        self.settle()
        self._board.detach(session.cell)

    def _chains(self, keys: Sequence[BlockKey]) -> Iterator[list[BlockKey]]:
        """Runs of keys that follow each other in a chain."""
        chain: list[BlockKey] = []
        for key in keys:
            link = self._state.link(key)
            if link is None:
                continue
            if chain and link[0] != chain[-1]:
                yield chain
                chain = []
            chain.append(key)
        if chain:
            yield chain
