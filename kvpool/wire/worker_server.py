"""A worker's end of the router's calls: adapts a `WorkerHandler` of plain values to the generated servicer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from kvpool.errors import KvpoolError
from kvpool.request import DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, WorkerStatus
from kvpool.wire import convert_work as convert
from kvpool.wire.gen import worker_pb2_grpc as rpc
from kvpool.wire.status import code_of


class WorkerHandler(Protocol):
    """What a worker does. A caller that hangs up cancels the async generator it was consuming."""

    def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """Serve a prefill."""
        ...

    def decode(self, request: DecodeRequest) -> AsyncIterator[DecodeEvent]:
        """Serve a decode."""
        ...

    async def status(self) -> WorkerStatus:
        """Describe the worker."""
        ...


def add_worker(server: grpc.aio.Server, handler: WorkerHandler) -> None:
    """Register `handler` on `server`."""
    rpc.add_WorkerServicer_to_server(_Servicer(handler), server)


class _Servicer(rpc.WorkerServicer):
    def __init__(self, handler: WorkerHandler) -> None:
        self._handler = handler

    async def Prefill(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Serve one prefill call."""
        start = lambda: self._handler.prefill(convert.prefill_from_pb(request))  # noqa: E731
        async for message in _serve(start, convert.prefill_event_to_pb, context):
            yield message

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Serve one decode call."""
        start = lambda: self._handler.decode(convert.decode_from_pb(request))  # noqa: E731
        async for message in _serve(start, convert.decode_event_to_pb, context):
            yield message

    async def Status(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Serve one status call."""
        try:
            return convert.status_to_pb(await self._handler.status())
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))


async def _serve(
    start: Callable[[], AsyncIterator[Any]], spell: Callable[[Any], Any], context: grpc.aio.ServicerContext
) -> AsyncIterator[Any]:
    """Run a handler's generator, always closing it, and turn kvpool errors into a status."""
    events: Any = None
    try:
        events = start()
        async for event in events:
            yield spell(event)
    except KvpoolError as error:
        await context.abort(code_of(error), str(error))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise  # the caller hung up, or the server stops
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the worker gave the request up")
    finally:
        if events is not None and hasattr(events, "aclose"):
            await events.aclose()
