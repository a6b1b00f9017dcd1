"""What this node asks all others, beside pushing blocks: the heads of extents that it can't find itself.

A block's extent is found by walking up its chain. Where the chain is broken here (the extents of the cluster have grown, or a block was
lost) another node may hold what is missing: it is asked for the head of the extent in which the gap lies.
"""

import asyncio
import logging
from collections.abc import Sequence

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.client.links import Links
from kvpool.client.sources import NodeRef
from kvpool.errors import KvpoolError
from kvpool.wire.credentials import Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.peer_client import PeerRpc
from kvpool.wire.peer_server import MAX_HEADS

log = logging.getLogger(__name__)

_ASK_S = 1.0


class Peers:
    """The other nodes that `links` knows, as node `me` asks them. On the event loop."""

    def __init__(self, me: str, links: Links, security: Security) -> None:
        self._me = me
        self._links = links
        self._security = security
        self._rpcs: dict[NodeRef, PeerRpc] = {}

    async def heads(self, keys: Sequence[BlockKey], extent_tokens: int) -> dict[BlockKey, BlockKey]:
        """The head of the extent of each of `keys` that some node can tell."""
        await self._prune()
        others = [ref for ref in self._links.nodes() if ref.node_id != self._me and not self._links.resting(ref)]
        found: dict[BlockKey, BlockKey] = {}
        for at in range(0, len(keys), MAX_HEADS):
            some = keys[at : at + MAX_HEADS]
            for heads in await asyncio.gather(*(self._ask(ref, some, extent_tokens) for ref in others)):
                found.update((key, BlockKey(head)) for key, head in zip(some, heads, strict=True) if len(head) == KEY_BYTES)
        return found

    async def close(self) -> None:
        """Disconnect."""
        await asyncio.gather(*(rpc.close() for rpc in self._rpcs.values()))
        self._rpcs.clear()

    async def _ask(self, ref: NodeRef, keys: Sequence[BlockKey], extent_tokens: int) -> Sequence[bytes]:
        rpc = self._rpcs.get(ref)
        if rpc is None:
            rpc = self._rpcs[ref] = PeerRpc(ref.address, NodeIdentity(ref.node_id, ref.incarnation), self._security)
        try:
            return await rpc.heads(keys, extent_tokens, _ASK_S)
        except KvpoolError as error:
            log.info("node %s doesn't say where blocks belong: %s", ref.node_id[:8], error)
            return [b""] * len(keys)

    async def _prune(self) -> None:
        live = set(self._links.nodes())
        gone = [self._rpcs.pop(ref) for ref in list(self._rpcs) if ref not in live]
        await asyncio.gather(*(rpc.close() for rpc in gone))
