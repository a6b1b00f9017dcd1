"""A router's end of what routers tell each other: adapts a `LoadsHandler` of plain values to the generated servicer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import grpc.aio

from kvpool.errors import KvpoolError
from kvpool.request.load import FlightTold, RouterReport
from kvpool.wire.auth import recheck
from kvpool.wire.gen import router_pb2 as pb
from kvpool.wire.gen import router_pb2_grpc as rpc
from kvpool.wire.status import code_of


class LoadsHandler(Protocol):
    """What a router tells others. Raises kvpool errors."""

    def loads(self) -> AsyncGenerator[RouterReport, None]:
        """A report at least every `REPORT_S`, without end; `UnavailableError` when there are too many listeners."""
        ...


def add_loads(server: grpc.aio.Server, handler: LoadsHandler) -> None:
    """Register `handler` on `server`."""
    rpc.add_RouterServicer_to_server(_Servicer(handler), server)


class _Servicer(rpc.RouterServicer):
    def __init__(self, handler: LoadsHandler) -> None:
        self._handler = handler

    async def Loads(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Tell one listener."""
        try:
            async with aclosing(self._handler.loads()) as reports:
                async for report in reports:
                    recheck()
                    await context.write(_spelled(report))
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))


def _spelled(report: RouterReport) -> Any:
    workers = [pb.WorkerLoad(**load._asdict()) for load in report.workers]
    return pb.LoadReport(workers=workers, flights=[_flight(flight) for flight in report.flights])


def _flight(flight: FlightTold) -> Any:
    return pb.Flight(**flight._asdict() | {"tags": b"".join(flight.tags)})
