"""While a request waits in line its blocks are brought to where they will be read, and kept there.

Theory. A node that is asked for a read lease brings what a slower tier holds into memory, and fetches what other nodes own as near copies
(`Pool.Acquire`, `fetch_from`). So one call to a node beside the worker that would be chosen now does both, SSD to DRAM and owner to near
copy; without a node there the owners are asked, each for its own. The lease is what protects the blocks: it is renewed while the request
waits and released once a worker has loaded them. Where a lease was forgotten it runs out by itself.

This is help, not duty: failures are counted and forgotten, and what is held for all that wait together is bounded (`max_tokens`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from kvpool.block import BlockKey
from kvpool.cluster import Member
from kvpool.errors import KvpoolError
from kvpool.policy.placement import NodeState
from kvpool.request.pool import Place
from router.nodes import NodeLinks
from router.pool import PoolView, orders_of, placed_nodes

log = logging.getLogger("router.prefetch")

LEASE_MS = 10_000
_AFTER_S = 0.02
"""Most waits are shorter, and then nothing is asked."""
_CALL_S = 4.0
_BATCH = 256
OWNER = "router"

T = TypeVar("T")


class LeasePort(Protocol):
    """A control connection to one life of a node (`kvpool.wire.pool_client.PoolRpc`). Raises kvpool errors."""

    async def acquire(
        self, owner: str, lease_ms: int, keys: Sequence[bytes], timeout_s: float, *, sequence: int = 0, fetch_from: Sequence[str] = ()
    ) -> tuple[int, list[Place | None]]:
        """Lease what is there, or can be brought there."""
        ...

    async def renew(self, lease_id: int, lease_ms: int, timeout_s: float) -> bool:
        """Move a lease's deadline."""
        ...

    async def release(self, lease_id: int, suspect: Sequence[bytes], timeout_s: float) -> None:
        """End a lease."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


@dataclass(slots=True, kw_only=True)
class Counts:
    """Since the start: waits for which blocks were asked for, blocks that were there in time, calls that failed, waits above the bound."""

    waits: int = 0
    blocks: int = 0
    failed: int = 0
    skipped: int = 0


class Prefetcher:
    """Holds the blocks of those who wait. Lives on one event loop."""

    def __init__(self, view: PoolView, connect: Callable[[Member], LeasePort], max_tokens: int) -> None:
        """`max_tokens` (0: nothing is fetched) bounds what is held at a time for all requests together."""
        self._view = view
        self._links = NodeLinks[LeasePort](connect)
        self._max_tokens = max_tokens
        self._tokens = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts = Counts()

    @property
    def held_tokens(self) -> int:
        """Tokens that are held, or being fetched, now."""
        return self._tokens

    @contextmanager
    def hold(self, keys: Sequence[BlockKey], first: int, *, block_tokens: int, host: str) -> Iterator[None]:
        """Bring blocks `first`... of the chain `keys` near `host` ("": unknown) and keep them for the length of the block."""
        tokens = (len(keys) - first) * block_tokens
        if tokens <= 0 or not self._max_tokens:
            yield
            return
        if self._tokens + tokens > self._max_tokens:
            self.counts.skipped += 1
            yield
            return
        self._tokens += tokens
        task = asyncio.get_running_loop().create_task(self._run(tuple(keys), first, block_tokens, host, tokens))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            yield
        finally:
            task.cancel()

    async def close(self) -> None:
        """Let go of everything; bounded."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._links.close()

    async def _run(self, keys: tuple[BlockKey, ...], first: int, block_tokens: int, host: str, tokens: int) -> None:
        leases: list[tuple[Member, int]] = []
        try:
            await asyncio.sleep(_AFTER_S)
            self.counts.waits += 1
            nodes = {member.id: member for member in self._view.members("node")}
            await self._links.keep({(member.id, member.incarnation) for member in nodes.values()})
            for node_id, fetch_from, some in self._plan(keys, first, block_tokens, host):
                if node_id in nodes:
                    await self._acquire(nodes[node_id], fetch_from, some, leases)
            while leases:
                await asyncio.sleep(LEASE_MS / 3000)
                for node, lease_id in leases:
                    await self._call(node, partial(_renew, lease_id))
        finally:
            self._tokens -= tokens
            for node, lease_id in leases:
                await self._call(node, partial(_release, lease_id))

    def _plan(
        self, keys: tuple[BlockKey, ...], first: int, block_tokens: int, host: str
    ) -> Iterator[tuple[str, tuple[str, ...], list[BlockKey]]]:
        """Whom to ask for which blocks, and from whom that node may fetch them."""
        if not self._view.members("node"):
            return
        near = ""
        if host and self._view.config.near_copies:
            near = next((n.id for n in placed_nodes(self._view) if n.host == host and n.state is NodeState.ACTIVE), "")
        orders = orders_of(self._view, keys, block_tokens)
        groups: dict[tuple[str, ...], list[BlockKey]] = {}
        for key, order in zip(keys[first:], orders[first:], strict=True):
            groups.setdefault(order, []).append(key)
        for order, group in groups.items():
            for at in range(0, len(group), _BATCH):
                yield near or order[0], tuple(n for n in order if n != near) if near else (), group[at : at + _BATCH]

    async def _acquire(self, node: Member, fetch_from: tuple[str, ...], keys: list[BlockKey], leases: list[tuple[Member, int]]) -> None:
        answer = await self._call(node, lambda port: port.acquire(OWNER, LEASE_MS, keys, _CALL_S, fetch_from=fetch_from))
        if answer is not None:
            lease_id, found = answer
            self.counts.blocks += sum(place is not None for place in found)
            if lease_id:
                leases.append((node, lease_id))

    async def _call(self, node: Member, ask: Callable[[LeasePort], Awaitable[T]]) -> T | None:
        """The answer of one call; None when it failed."""
        try:
            async with asyncio.timeout(_CALL_S), self._links.use(node) as port:
                return await ask(port)
        except (KvpoolError, TimeoutError) as error:
            self.counts.failed += 1
            log.debug("node %s: %s", node.id[:8], error or "no answer in time")
            return None


async def _renew(lease_id: int, port: LeasePort) -> bool:
    return await port.renew(lease_id, LEASE_MS, _CALL_S)


async def _release(lease_id: int, port: LeasePort) -> None:
    await port.release(lease_id, (), _CALL_S)
