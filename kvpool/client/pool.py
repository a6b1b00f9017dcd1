"""The asynchronous client of a pool: look up, load and store blocks of a token chain, on however many nodes.

One call, whatever the number of blocks, costs one control message per node that owns some of them, then bytes. The three steps
of a load are: lease what is there (in parallel on all nodes), move and validate the leading run in a worker thread, let the
leases go (in the background). A store: reserve, move, commit. Which node is asked for what is computed (`kvpool/policy/placement.py`);
`asking.py` says what happens when it doesn't have it, doesn't answer, or is slow.

Remote trouble is not the caller's trouble: where no node can help, a miss, a dead node, a passed deadline ends the run, and the count that
is returned says how far it got. Only the caller's own mistakes raise (`LocalError`).
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Self

from kvpool.block import BlockKey, Namespace, chain_keys
from kvpool.client import reading, writing
from kvpool.client.core import CONTROL_S, Checksums, Core, check_checksums
from kvpool.client.layered import LayerRun, layers
from kvpool.client.nearby import Nearby
from kvpool.client.retention import Retention, check_retention
from kvpool.client.scoped import ScopedPool
from kvpool.client.sources import NodeSource, open_source
from kvpool.client.transfer import Payload, Touch
from kvpool.client.writing import Wish
from kvpool.cluster import Membership
from kvpool.request import Scope
from kvpool.units import SECOND
from kvpool.wire.credentials import PLAIN, Security

_CONNECT_S = 5.0
_TEND_S = 2.0


class AsyncPoolClient:
    """A pool as seen from one event loop, for one `Namespace`. Made by `open`; also an async context manager."""

    def __init__(
        self, namespace: Namespace, source: NodeSource, transport: str, security: Security = PLAIN, *, checksums: Checksums = "wire"
    ) -> None:
        self.namespace = namespace
        self.under_replicated = 0
        """Copies that were missing after a store of this client, in all: their nodes were away or full. The nodes repair them."""
        self._core = Core(namespace, source, transport, security, checksums=checksums)

    @classmethod
    async def open(
        cls,
        source: str | Membership,
        namespace: Namespace,
        *,
        transport: str = "auto",
        timeout_s: float = 5.0,
        eager: bool = False,
        copies: int | None = None,
        security: Security = PLAIN,
        checksums: Checksums = "wire",
    ) -> Self:
        """Connect to `source`: a cluster URL (`redis://…`), an open membership, or node addresses (`host:port[,host:port…]`).

        A membership stays the caller's to close; through one that has joined, nodes that can't be reached are reported to the cluster.
        `copies` is for addresses: on how many of them each block is to be, 1 by default. Nodes are connected to when they are first
        needed; with `eager` ahead of need, as they appear, in the background. `checksums`: `wire` looks at those of blocks that may have
        crossed a wire or a disk unchecked, `always` at those of blocks in this host's memory too.
        """
        check_checksums(checksums)
        nodes = await open_source(source, timeout_s, security, copies=copies)
        client = cls(namespace, nodes, transport, security, checksums=checksums)
        client._core.background.spawn(client._tend(eager=eager))
        return client

    async def connect(self) -> list[str]:
        """Connect to all nodes now; why some of them can't be had."""
        return await self._core.links.connect_all(_CONNECT_S)

    def keys(self, tokens: Sequence[int], *, tail: bool = False) -> list[BlockKey]:
        """The chain of `tokens`: one key a full block, and with `tail` one for the partial block at the end."""
        return chain_keys(self._core.framer.root, tokens, self.namespace.geometry.block_tokens, tail=tail)

    def reaches(self) -> dict[str, str]:
        """Reach in use per node id."""
        return self._core.links.reaches()

    def direct(self) -> dict[str, int]:
        """What reads by key came to, in blocks: `hits`, `misses` (asked for under a lease then), `retries` (changed amid a copy)."""
        return self._core.direct()

    def nearby(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> Nearby:
        """What a thread can do by itself, without the event loop `loop` of this client: see `Nearby`."""
        return Nearby(self._core, loop, timeout_s)

    def scoped(self, scope: Scope) -> ScopedPool:
        """This pool as one tenant's requests see it, for as long as this client is open."""
        return ScopedPool(self._core, scope)

    async def lookup(self, chain: Sequence[BlockKey], *, timeout_s: float = CONTROL_S) -> int:
        """How many leading blocks of `chain` the pool holds. A probe: takes no lease, changes no order."""
        return await reading.lookup(self._core, chain, time.monotonic_ns() + int(timeout_s * SECOND))

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Touch, *, deadline_ns: int) -> int:
        """Deliver the leading run of chain[first : first + len(counts)] to `sink(i, payload)`; how many were delivered.

        `counts[j]` is the number of tokens expected in block first + j. `sink` runs in a worker thread, in order of i; its
        payload is valid only during the call. `deadline_ns` is monotonic.
        """
        return await reading.load(self._core, chain, first, counts, sink, deadline_ns)

    async def layers(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], *, deadline_ns: int) -> LayerRun:
        """The leading run of chain[first : first + len(counts)], to come layer by layer; of no blocks where only `load` will do."""
        return await layers(self._core, chain, first, counts, deadline_ns)

    async def load_into(self, chain: Sequence[BlockKey], first: int, targets: Sequence[Payload], *, deadline_ns: int) -> int:
        """Fill `targets` with the leading run of chain[first : first + len(targets)], without a copy in between where possible.

        A target is a contiguous, writable uint8 array of a block's payload bytes, which say how many tokens it has. Returns the length
        of the leading run; what targets behind it hold is not specified. Raises `ConfigError` for targets that fit no block.
        """
        return await reading.load_into(self._core, chain, first, self._core.tokens_of(targets), targets, deadline_ns)

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
        also: Sequence[str] = (),
    ) -> int:
        """Make chain[first : first + len(counts)] present: calls `fill(i, payload)` for those that a node lacks and has room for.

        `fill` runs in a worker thread, in order of i (first for the blocks that only a node of this host is to have), and must write the
        whole payload. Returns how many of the blocks the
        pool now holds. `ttl_ns` bounds the life of the blocks that are written (0: none); `retention` says which tokens are worth
        keeping longer or shorter than others; their bytes count against the quota of `tenant`. `also` names nodes where
        the blocks are wanted next: those that own none of them, nor have an owner on their host, get near copies, if they can.
        """
        check_retention(retention)
        wish = Wish(ttl_ns, retention, tenant)
        stored = await writing.store(self._core, chain, first, counts, fill, deadline_ns=deadline_ns, wish=wish, also=also)
        self.under_replicated += stored.missing
        return stored.held

    async def close(self) -> None:
        """Finish what runs in the background (bounded), disconnect. A second call does nothing."""
        if not self._core.closed:
            self._core.ending.set()
            await self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _tend(self, *, eager: bool) -> None:
        """Let go of nodes that are gone, probe those that are ill, even while nobody asks; with `eager`, connect to those that come."""
        while not self._core.closed:
            await self._core.links.prune()
            await self._core.links.care()
            await self._core.links.drop_ended()
            await self._core.give_back_idle()
            if eager:
                await self.connect()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TEND_S):
                    await self._core.ending.wait()
