"""A consumer's end of a node's events: plain values out, kvpool errors only."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio

from kvpool.errors import DeadlineError, ProtocolError, UnavailableError
from kvpool.request.events import EventBatch
from kvpool.wire.convert_events import batch_from_pb
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import events_pb2 as pb
from kvpool.wire.gen import events_pb2_grpc as rpc
from kvpool.wire.node_rpc import NodeRpc
from kvpool.wire.status import error_of


class EventsRpc(NodeRpc):
    """A consumer's connection to the node at `address` (host:port), for use on one event loop.

    Errors: `ConfigError`, `UnavailableError` (also when the node has too many consumers), `DeadlineError`, `ProtocolError` (also from a
    node too old to know the call).
    """

    def __init__(self, address: str, node: NodeIdentity | None = None, security: Security = PLAIN) -> None:
        super().__init__(address, node, security)
        self._stub: Any = rpc.EventsStub(self._channel)

    async def watch(self, incarnation: int, sequence: int, patience_s: float) -> AsyncGenerator[EventBatch, None]:
        """Batches from change `sequence` of the life `incarnation` on (0: from a snapshot on), without end.

        `DeadlineError` when none comes for `patience_s`; a node sends one every `KEEPALIVE_S`. Close the generator to end the call.
        """
        call = self._stub.Watch(pb.WatchRequest(incarnation=incarnation, sequence=sequence), metadata=self._metadata)
        try:
            while True:
                message = await self._read(call, patience_s)
                if message is grpc.aio.EOF:
                    raise UnavailableError(f"{self.address}: the node ended the stream of events")
                try:
                    batch = batch_from_pb(message)
                except ValueError as error:
                    raise ProtocolError(f"{self.address}: a batch of events can't be read: {error}; is the node newer?") from error
                yield batch
        finally:
            call.cancel()

    async def _read(self, call: Any, patience_s: float) -> Any:
        limit = asyncio.timeout(patience_s)
        try:
            async with limit:
                return await call.read()
        except TimeoutError as error:
            if limit.expired():
                raise DeadlineError(f"{self.address}: no events and no keep-alive for {patience_s:g} s") from error
            raise
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise UnavailableError(f"{self.address}: the connection was closed during the call") from None
