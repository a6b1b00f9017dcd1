"""A router's connection to another one: plain values out, kvpool errors only."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from kvpool.errors import ProtocolError, UnavailableError
from kvpool.request.load import MAX_WORKERS, LoadReport, WorkerLoad
from kvpool.wire.channel import open_channel
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.gen import router_pb2 as pb
from kvpool.wire.gen import router_pb2_grpc as rpc
from kvpool.wire.status import next_message


class RouterRpc:
    """A connection to the router at `address` (host:port), for use on one event loop."""

    def __init__(self, address: str, security: Security = PLAIN) -> None:
        self.address = address
        self._security = security
        self._channel = open_channel(address, security)
        self._stub: Any = rpc.RouterStub(self._channel)

    async def loads(self, patience_s: float) -> AsyncGenerator[LoadReport, None]:
        """Its reports, without end. `DeadlineError` when none comes for `patience_s`, `UnavailableError` when it is gone."""
        call = self._stub.Loads(pb.LoadsRequest(), metadata=self._security.metadata(self.address))
        try:
            while True:
                message = await next_message(call, self.address, patience_s, "report")
                if message is grpc.aio.EOF:
                    raise UnavailableError(f"{self.address}: the router ended its reports")
                if len(message.workers) > MAX_WORKERS:
                    raise ProtocolError(f"{self.address}: a report of {len(message.workers)} workers, {MAX_WORKERS} at most")
                yield tuple(
                    WorkerLoad(w.role, w.id, w.incarnation, w.active, w.queued, w.backlog_tokens, w.decode_tokens) for w in message.workers
                )
        finally:
            call.cancel()

    async def close(self) -> None:
        """Cancel what is in flight and disconnect."""
        await self._channel.close(grace=None)
