"""A consumer's end of a node's events: plain values out, kvpool errors only."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from kvpool.errors import ProtocolError, UnavailableError
from kvpool.request.events import EventBatch
from kvpool.wire.convert_events import batch_from_pb
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import events_pb2 as pb
from kvpool.wire.gen import events_pb2_grpc as rpc
from kvpool.wire.node_rpc import NodeRpc
from kvpool.wire.status import next_message


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
                message = await next_message(call, self.address, patience_s, "events and no keep-alive")
                if message is grpc.aio.EOF:
                    raise UnavailableError(f"{self.address}: the node ended the stream of events")
                try:
                    batch = batch_from_pb(message)
                except ValueError as error:
                    raise ProtocolError(f"{self.address}: a batch of events can't be read: {error}; is the node newer?") from error
                yield batch
        finally:
            call.cancel()
