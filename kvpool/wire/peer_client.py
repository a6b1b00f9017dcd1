"""A pool node's connection to another one for what only nodes ask: plain values in and out, kvpool errors only."""

from collections.abc import Sequence
from typing import Any

from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import peer_pb2 as pb
from kvpool.wire.gen import peer_pb2_grpc as rpc
from kvpool.wire.node_rpc import NodeRpc


class PeerRpc(NodeRpc):
    """Calls to the node `node` at `address`, on one event loop. Errors as of `PoolRpc`."""

    def __init__(self, address: str, node: NodeIdentity, security: Security = PLAIN) -> None:
        super().__init__(address, node, security)
        self._stub: Any = rpc.PeerStub(self._channel)

    async def handed_over(self, me: NodeIdentity, timeout_s: float) -> bool:
        """Whether the node has pushed to `me` all that is `me`'s, as far as it holds it."""
        request = pb.HandoverRequest(node_id=me.node_id, incarnation=me.incarnation)
        return bool((await self._call(self._stub.Handover, request, timeout_s)).done)

    async def heads(self, keys: Sequence[bytes], extent_tokens: int, timeout_s: float) -> list[bytes]:
        """The first block of the extent of each of `keys`; empty where the node can't tell."""
        answer = await self._call(self._stub.Heads, pb.HeadsRequest(keys=keys, extent_tokens=extent_tokens), timeout_s)
        self._same_length(len(answer.heads), len(keys))
        return list(answer.heads)
