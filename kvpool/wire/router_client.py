"""A router's connection to another one: plain values out, kvpool errors only."""

from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio

from kvpool.errors import ProtocolError, UnavailableError
from kvpool.request.load import MAX_FLIGHTS, MAX_TAGS, MAX_WORKERS, TAG_BYTES, FlightTold, RouterReport, WorkerLoad
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

    async def loads(self, patience_s: float) -> AsyncGenerator[RouterReport, None]:
        """Its reports, without end. `DeadlineError` when none comes for `patience_s`, `UnavailableError` when it is gone."""
        call = self._stub.Loads(pb.LoadsRequest(), metadata=self._security.metadata(self.address))
        try:
            while True:
                message = await next_message(call, self.address, patience_s, "report")
                if message is grpc.aio.EOF:
                    raise UnavailableError(f"{self.address}: the router ended its reports")
                yield _read(message, self.address)
        finally:
            call.cancel()

    async def close(self) -> None:
        """Cancel what is in flight and disconnect."""
        await self._channel.close(grace=None)


def _read(message: Any, address: str) -> RouterReport:
    """The report in `message`. Raises `ProtocolError` for one that is beyond the limits."""
    workers, flights = message.workers, message.flights
    tags = sum(len(flight.tags) for flight in flights)
    if len(workers) > MAX_WORKERS or len(flights) > MAX_FLIGHTS or tags > MAX_TAGS * TAG_BYTES:
        raise ProtocolError(
            f"{address}: a report of {len(workers)} workers and {len(flights)} flights with {tags} bytes of tags is too large"
        )
    return RouterReport(
        workers=tuple(WorkerLoad(w.role, w.id, w.incarnation, w.active, w.queued, w.backlog_tokens, w.decode_tokens) for w in workers),
        flights=tuple(FlightTold(f.number, f.priority, f.first, _tags(f.tags), f.begun, f.over, f.held) for f in flights),
    )


def _tags(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[at : at + TAG_BYTES] for at in range(0, len(joined), TAG_BYTES))
