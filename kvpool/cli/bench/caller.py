"""A client of the pool as the benches call it: by keys that are known already, from one thread, straight into the caller's memory."""

import asyncio
from collections.abc import Sequence
from typing import Self

import kvpool
from kvpool.block import BlockKey, Namespace
from kvpool.cli.bench.space import BLOCK_TOKENS, Rows
from kvpool.client.core import Checksums
from kvpool.client.views import View
from kvpool.request.admin import MAX_ADMIN_KEYS
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity

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
        checksums: Checksums = "wire",
        security: Security = PLAIN,
    ) -> None:
        self._nodes, self._security = nodes, security
        self._client = kvpool.connect(source, namespace=space, transport=reach, timeout_s=LIMIT_S, security=security, checksums=checksums)
        self.keys = self._client.keys
        """The keys of a prompt."""

    def get(self, chain: Chain, rows: Rows) -> int:
        """Read the leading blocks of `chain` into `rows`, uint8 `[blocks, bytes]`; how many there were."""
        return self._client.get_blocks(chain, rows).tokens // BLOCK_TOKENS

    def put(self, chain: Chain, rows: Rows, *, ttl_s: float = 0.0) -> int:
        """Store `rows` as the blocks of `chain`; how many of them the pool holds."""
        return self._client.put_blocks(chain, rows, ttl_s=ttl_s)

    def probe(self, chain: Chain) -> int:
        """How many leading blocks of `chain` the pool holds."""
        return self._client.lookup_blocks(chain)

    def view(self, chain: Chain) -> int:
        """Look at the leading blocks of `chain` where they are, and let them go again; how many there were."""
        with self._client.view_blocks(chain) as view:
            return view.tokens // BLOCK_TOKENS

    def look(self, chain: Chain) -> View:
        """A view of the leading blocks of `chain`, for the caller to close."""
        return self._client.view_blocks(chain)

    def forget(self, keys: Chain) -> None:
        """Have the nodes remove blocks that this bench has stored. Raises `AccessError` for who mayn't."""
        asyncio.run(_evict(self._nodes, keys, self._security))

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _evict(nodes: Admin, keys: Chain, security: Security) -> None:
    for address, identity in nodes:
        rpc = AdminRpc(address, identity, security)
        try:
            for at in range(0, len(keys), MAX_ADMIN_KEYS):
                await rpc.evict(keys[at : at + MAX_ADMIN_KEYS], LIMIT_S)
        finally:
            await rpc.close()
