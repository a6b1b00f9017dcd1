"""A client of the pool as the benches call it: by keys that are known already, from one thread, straight into the caller's memory."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar

from kvpool.block import BlockKey, Namespace
from kvpool.cli.bench.space import BLOCK_TOKENS, Rows
from kvpool.client import AsyncPoolClient
from kvpool.errors import UnavailableError
from kvpool.request.admin import MAX_ADMIN_KEYS
from kvpool.units import SECOND
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity

T = TypeVar("T")
Chain = Sequence[BlockKey]
Admin = Sequence[tuple[str, NodeIdentity]]
"""Address and identity of each node."""

LIMIT_S = 10.0


class Caller:
    """One client of `space` at `source` (a cluster's URL or addresses) by `reach`. Raises `UnavailableError` when it reaches no node.

    Keys are made ahead because hashing tokens isn't what is measured. `nodes` are those that are asked to `forget`.
    """

    def __init__(
        self,
        source: str,
        space: Namespace,
        reach: str,
        *,
        nodes: Admin = (),
        copies: int | None = None,
        security: Security = PLAIN,
    ) -> None:
        self._nodes, self._security = nodes, security
        self._loop = asyncio.new_event_loop()
        try:
            opening = AsyncPoolClient.open(source, space, transport=reach, timeout_s=LIMIT_S, copies=copies, security=security)
            self._pool = self._loop.run_until_complete(opening)
        except BaseException:
            self._loop.close()
            raise
        reasons = self._loop.run_until_complete(self._pool.connect())
        self.reaches = tuple(sorted(set(self._pool.reaches().values())))
        """Those in use."""
        if not self.reaches:
            self.close()
            raise UnavailableError("; ".join(reasons) or "there is no node")

    def keys(self, tokens: Sequence[int]) -> list[BlockKey]:
        """The keys of a prompt."""
        return self._pool.keys(tokens)

    def get(self, chain: Chain, rows: Rows) -> int:
        """Read the leading blocks of `chain` into `rows`, uint8 `[blocks, bytes]`; how many there were."""

        def sink(index: int, payload: Rows) -> None:
            rows[index] = payload

        return self._run(self._pool.load(chain, 0, [BLOCK_TOKENS] * len(chain), sink, deadline_ns=_deadline_ns()))

    def put(self, chain: Chain, rows: Rows, *, ttl_s: float = 0.0) -> int:
        """Store `rows` as the blocks of `chain`; how many of them the pool holds."""

        def fill(index: int, payload: Rows) -> None:
            payload[:] = rows[index]

        counts = [BLOCK_TOKENS] * len(chain)
        return self._run(self._pool.store(chain, 0, counts, fill, deadline_ns=_deadline_ns(), ttl_ns=int(ttl_s * SECOND)))

    def probe(self, chain: Chain) -> int:
        """How many leading blocks of `chain` the pool holds."""
        return self._run(self._pool.lookup(chain, timeout_s=LIMIT_S))

    def forget(self, keys: Chain) -> None:
        """Have the nodes remove blocks that this bench has stored. Raises `AccessError` for who mayn't."""
        self._run(_evict(self._nodes, keys, self._security))

    def close(self) -> None:
        """Disconnect."""
        self._loop.run_until_complete(self._pool.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


async def _evict(nodes: Admin, keys: Chain, security: Security) -> None:
    for address, identity in nodes:
        rpc = AdminRpc(address, identity, security)
        try:
            for at in range(0, len(keys), MAX_ADMIN_KEYS):
                await rpc.evict(keys[at : at + MAX_ADMIN_KEYS], LIMIT_S)
        finally:
            await rpc.close()


def _deadline_ns() -> int:
    return time.monotonic_ns() + int(LIMIT_S * SECOND)
