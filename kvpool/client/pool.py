"""The asynchronous client of a pool: look up, load and store blocks of a token chain, on however many nodes.

One call, whatever the number of blocks, costs one control message per node that owns some of them, then bytes. The three steps
of a load are: lease what is there (in parallel on all nodes), move and validate the leading run in a worker thread, let the
leases go (in the background). A store: reserve, move, commit.

Remote trouble is not the caller's trouble: a miss, a dead node, a passed deadline ends the run, and the count that is returned
says how far it got. Only the caller's own mistakes raise (`LocalError`).
"""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from kvpool.block import BlockKey, Namespace, chain_keys
from kvpool.block.frame import Framer
from kvpool.client.leasing import keep_alive, lease_ms
from kvpool.client.links import Links, NodeLink
from kvpool.client.plan import by_node, leading, owners_of
from kvpool.client.retention import Retention, check_retention, priority_of
from kvpool.client.sources import NodeRef, NodeSource, open_source
from kvpool.client.transfer import Piece, Stages, Touch, Transfer
from kvpool.clock import seconds_left
from kvpool.errors import ClosedError, DeadlineError, RemoteError, UnavailableError
from kvpool.policy.placement import PlacedNode
from kvpool.request.pool import Outcome, Reservation
from kvpool.units import MS
from kvpool.wire.credentials import PLAIN, Security

log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 4
_CONTROL_S = 2.0
"""Longest wait for one control message."""
_CONNECT_S = 5.0
_TEND_S = 2.0


class AsyncPoolClient:
    """A pool as seen from one event loop, for one `Namespace`. Made by `open`; also an async context manager."""

    def __init__(self, namespace: Namespace, source: NodeSource, transport: str, security: Security = PLAIN) -> None:
        self.namespace = namespace
        self._framer = Framer(namespace)
        self._links = Links(source, transport, security)
        self._stages = Stages(self._framer.frame_bytes(namespace.geometry.block_tokens))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvpool-bytes")
        self._background: set[asyncio.Task[None]] = set()
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._closed = False
        self._ending = asyncio.Event()

    @classmethod
    async def open(
        cls,
        source: str,
        namespace: Namespace,
        *,
        transport: str = "auto",
        timeout_s: float = 5.0,
        eager: bool = False,
        security: Security = PLAIN,
    ) -> Self:
        """Connect to `source`: a cluster URL (`redis://…`) or node addresses (`host:port[,host:port…]`).

        Nodes are connected to when they are first needed; with `eager` ahead of need, as they appear, in the background.
        """
        client = cls(namespace, await open_source(source, timeout_s, security), transport, security)
        client._spawn(client._tend(eager=eager))
        return client

    async def connect(self) -> list[str]:
        """Connect to all nodes now; why some of them can't be had."""
        return await self._links.connect_all(_CONNECT_S)

    def keys(self, tokens: Sequence[int], *, tail: bool = False) -> list[BlockKey]:
        """The chain of `tokens`: one key a full block, and with `tail` one for the partial block at the end."""
        return chain_keys(self._framer.root, tokens, self.namespace.geometry.block_tokens, tail=tail)

    def reaches(self) -> dict[str, str]:
        """Reach in use per node id."""
        return self._links.reaches()

    async def lookup(self, chain: Sequence[BlockKey], *, timeout_s: float = _CONTROL_S) -> int:
        """How many leading blocks of `chain` the pool holds. A probe: takes no lease, changes no order."""
        groups, refs = self._placed(chain, 0, len(chain))

        async def probe(link: NodeLink, positions: list[int]) -> bytes:
            return await link.rpc.lookup([chain[i] for i in positions], timeout_s)

        present = bytearray(len(chain))
        for node_id, answer in (await self._ask_all(groups, refs, probe, timeout_s)).items():
            for position, bit in zip(groups[node_id], answer[1], strict=True):
                present[position] = bit
        return leading(present)

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Touch, *, deadline_ns: int) -> int:
        """Deliver the leading run of chain[first : first + len(counts)] to `sink(i, payload)`; how many were delivered.

        `counts[j]` is the number of tokens expected in block first + j. `sink` runs in a worker thread, in order of i; its
        payload is valid only during the call. `deadline_ns` is monotonic.
        """
        groups, refs = self._placed(chain, first, len(counts))
        remaining_s = min(_CONTROL_S, seconds_left(deadline_ns))
        if not groups or remaining_s <= 0:
            return 0
        length_ms = lease_ms(sum(map(self._framer.frame_bytes, counts)), deadline_ns)
        sequence = len(chain) * self.namespace.geometry.block_tokens

        async def acquire(link: NodeLink, positions: list[int]) -> tuple[int, list[tuple[int, int] | None]]:
            keys = [chain[first + j] for j in positions]
            return await link.rpc.acquire(self._owner, length_ms, keys, remaining_s, sequence=sequence)

        answers = await self._ask_all(groups, refs, acquire, remaining_s)
        places: list[tuple[str, int, int] | None] = [None] * len(counts)
        for node_id, (_, (_, found)) in answers.items():
            for j, place in zip(groups[node_id], found, strict=True):
                places[j] = None if place is None else (node_id, *place)
        pieces = [(first + j, *place) for j, place in enumerate(places[: leading(places)]) if place is not None]
        transfer = _transfer(answers, pieces, chain, first, counts, deadline_ns)
        try:
            await self._move(transfer, transfer.read, sink, length_ms)
        finally:
            self._let_go(transfer)
        return transfer.done

    async def store(
        self,
        chain: Sequence[BlockKey],
        first: int,
        counts: Sequence[int],
        fill: Touch,
        *,
        deadline_ns: int,
        ttl_ns: int = 0,
        retention: Sequence[Retention] = (),
        tenant: str = "",
    ) -> int:
        """Make chain[first : first + len(counts)] present: calls `fill(i, payload)` for those the pool lacks and has room for.

        `fill` runs in a worker thread, in order of i, and must write the whole payload. Returns how many of the blocks the
        pool now holds. `ttl_ns` bounds the life of the blocks that are written (0: none); `retention` says which tokens are worth
        keeping longer or shorter than others; their bytes count against the quota of `tenant`.
        """
        check_retention(retention)
        groups, refs = self._placed(chain, first, len(counts))
        remaining_s = min(_CONTROL_S, seconds_left(deadline_ns))
        if not groups or remaining_s <= 0:
            return 0
        length_ms = lease_ms(sum(map(self._framer.frame_bytes, counts)), deadline_ns)
        block_tokens = self.namespace.geometry.block_tokens

        def reservation(index: int, n_tokens: int) -> Reservation:
            start, parent = index * block_tokens, chain[index - 1] if index else b""
            rank = priority_of(retention, start, start + n_tokens)
            return Reservation(chain[index], parent, start, self._framer.frame_bytes(n_tokens), ttl_ns // MS, *rank)

        async def reserve(link: NodeLink, positions: list[int]) -> tuple[int, list[tuple[Outcome, int]]]:
            blocks = [reservation(first + j, counts[j]) for j in positions]
            timeout_s = min(_CONTROL_S, max(seconds_left(deadline_ns), 0.001))
            sequence = len(chain) * block_tokens
            return await link.rpc.reserve(self._owner, length_ms, blocks, timeout_s, sequence=sequence, tenant=tenant)

        answers = await self._ask_all(groups, refs, reserve, remaining_s)
        held, granted = 0, list[Piece]()
        for node_id, (_, (_, grants)) in answers.items():
            for j, (outcome, offset) in zip(groups[node_id], grants, strict=True):
                held += outcome is Outcome.EXISTS
                if outcome is Outcome.GRANTED:
                    granted.append((first + j, node_id, offset, self._framer.frame_bytes(counts[j])))
        granted.sort()
        transfer = _transfer(answers, granted, chain, first, counts, deadline_ns)
        try:
            await self._move(transfer, transfer.write, fill, length_ms)
            held += await self._commit(transfer)
        finally:
            self._let_go(transfer)
        return held

    async def close(self) -> None:
        """Finish what runs in the background (bounded), disconnect. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._ending.set()
        if self._background:
            await asyncio.wait(self._background, timeout=_CONTROL_S)
        await self._links.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _placed(self, chain: Sequence[BlockKey], first: int, count: int) -> tuple[dict[str, list[int]], dict[str, NodeRef]]:
        """Positions (from `first`) per owning node that may be asked now, and all nodes.

        Ownership follows from who is alive, for everybody alike; a node that failed a moment ago is a miss, not disowned.
        """
        if self._closed:
            raise ClosedError("this client was closed")
        refs = {ref.node_id: ref for ref in self._links.nodes()}
        if not refs:
            self._links.look_again()
        if not refs or not count:
            return {}, refs
        weights = [PlacedNode(id=node_id) for node_id in refs]
        groups = by_node(owners_of(chain, first, count, self.namespace.geometry.block_tokens, weights))
        return {node_id: positions for node_id, positions in groups.items() if not self._links.resting(refs[node_id])}, refs

    async def _ask_all(
        self,
        groups: Mapping[str, list[int]],
        refs: Mapping[str, NodeRef],
        ask: Callable[[NodeLink, list[int]], Awaitable[T]],
        timeout_s: float,
    ) -> dict[str, tuple[NodeLink, T]]:
        """Ask every node about its positions at once; nodes that fail are missing from the answer."""

        async def one(node_id: str, positions: list[int]) -> tuple[NodeLink, T] | None:
            try:
                link = await self._links.link(refs[node_id], timeout_s)
            except RemoteError as error:
                log.warning("node %s: %s", node_id[:8], error)
                return None
            try:
                return link, await ask(link, positions)
            except RemoteError as error:
                log.warning("node %s: %s", node_id[:8], error)
                await self._links.failed(refs[node_id])
                return None

        answers = await asyncio.gather(*(one(node_id, positions) for node_id, positions in groups.items()))
        return {node_id: answer for node_id, answer in zip(groups, answers, strict=True) if answer is not None}

    async def _move(self, transfer: Transfer, mover: Callable[[Framer, Stages, Touch], None], touch: Touch, length_ms: int) -> None:
        """Run `mover` in a worker thread, its leases kept alive meanwhile. A cancelled task stops the thread and waits for it first."""
        if not transfer.pieces:
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, mover, self._framer, self._stages, touch)
        renewal = loop.create_task(keep_alive(transfer, length_ms))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            transfer.stopped.set()
            await asyncio.wait([work])  # bounded by the transfer's deadline
            raise
        except (RemoteError, ClosedError) as error:
            node_id = transfer.busy_on
            if node_id is None:
                raise
            log.warning("transfer with node %s: %s", node_id[:8], error)
            link = transfer.links[node_id]
            if isinstance(error, DeadlineError) and link.reach.name == "shm":
                return  # a copy in memory was late because this host is busy: the node has no part in it
            await self._links.failed(link.node, reach=link.reach.name if isinstance(error, UnavailableError) else None)
        finally:
            renewal.cancel()

    async def _commit(self, transfer: Transfer) -> int:
        """Publish what was written; how many blocks that made visible."""
        keys: dict[str, list[BlockKey]] = {}
        for index, node_id, _, _ in transfer.pieces[: transfer.done]:
            keys.setdefault(node_id, []).append(transfer.chain[index])

        async def one(node_id: str) -> int:
            try:
                return sum(await transfer.links[node_id].rpc.commit(transfer.leases[node_id], keys[node_id], _CONTROL_S))
            except RemoteError as error:
                log.warning("commit on node %s: %s", node_id[:8], error)
                await self._links.failed(transfer.links[node_id].node)
                return 0

        return sum(await asyncio.gather(*(one(node_id) for node_id in keys)))

    def _let_go(self, transfer: Transfer) -> None:
        """Release the leases in the background: the caller has what it came for."""

        async def release(node_id: str, lease_id: int) -> None:
            try:
                await transfer.links[node_id].rpc.release(lease_id, transfer.suspect.get(node_id, ()), _CONTROL_S)
            except RemoteError as error:
                log.debug("release on node %s: %s; the lease will run out", node_id[:8], error)

        for node_id, lease_id in transfer.leases.items():
            if lease_id:
                self._spawn(release(node_id, lease_id))

    async def _tend(self, *, eager: bool) -> None:
        """Let go of nodes that are gone, even while nobody asks for anything; with `eager`, connect to those that have come."""
        while not self._closed:
            await self._links.prune()
            if eager:
                await self.connect()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _TEND_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _transfer(
    answers: Mapping[str, tuple[NodeLink, tuple[int, Any]]],
    pieces: Sequence[Piece],
    chain: Sequence[BlockKey],
    first: int,
    counts: Sequence[int],
    deadline_ns: int,
) -> Transfer:
    """The transfer of `pieces` under the leases that the nodes answered with: (link, (lease id, anything)) by node id."""
    return Transfer(
        links={node_id: link for node_id, (link, _) in answers.items()},
        leases={node_id: lease_id for node_id, (_, (lease_id, _)) in answers.items()},
        pieces=pieces,
        chain=chain,
        counts={first + j: n for j, n in enumerate(counts)},
        deadline_ns=deadline_ns,
    )
