"""A pool node's end of what other nodes ask it: adapts a `PeerHandler` of plain values to the generated servicer."""

from collections.abc import Sequence
from typing import Any, Protocol

import grpc.aio

from kvpool.errors import ConfigError, KvpoolError
from kvpool.wire import fence
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import peer_pb2 as pb
from kvpool.wire.gen import peer_pb2_grpc as rpc
from kvpool.wire.status import code_of

MAX_HEADS = 64


class PeerHandler(Protocol):
    """What a node answers other nodes. Never waits."""

    @property
    def identity(self) -> NodeIdentity:
        """Who answers; calls meant for somebody else are refused."""
        ...

    def left_for(self, node: NodeIdentity) -> int | None:
        """Blocks still to be pushed to `node`; None while no round over all blocks has ended that began after `node` was known."""
        ...

    def heads(self, keys: Sequence[bytes], extent_tokens: int) -> list[bytes]:
        """The first block of the extent of each of `keys`, empty where it isn't known here."""
        ...


def add_peer(server: grpc.aio.Server, handler: PeerHandler) -> None:
    """Register `handler` on `server`."""
    rpc.add_PeerServicer_to_server(_Servicer(handler), server)


class _Servicer(rpc.PeerServicer):
    def __init__(self, handler: PeerHandler) -> None:
        self._handler = handler

    async def Handover(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            fence.check(context.invocation_metadata(), self._handler.identity, needed=True)
            left = self._handler.left_for(NodeIdentity(request.node_id, request.incarnation))
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))
        return pb.HandoverResponse(done=left == 0, left=left or 0)

    async def Heads(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            fence.check(context.invocation_metadata(), self._handler.identity, needed=True)
            if len(request.keys) > MAX_HEADS:
                raise ConfigError(f"at most {MAX_HEADS} heads are told at a time, got {len(request.keys)}")
            heads = self._handler.heads(list(request.keys), request.extent_tokens)
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))
        return pb.HeadsResponse(heads=heads)
