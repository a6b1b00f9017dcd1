"""A pool node's end of the events: adapts an `EventsHandler` of plain values to the generated servicer.

A stream is written at the speed of its consumer: the next batch is made when the last one was taken, so nothing piles up. A consumer that
takes nothing for `TAKE_LIMIT_S` loses its stream, and its place.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import grpc.aio

from kvpool.errors import DeadlineError, KvpoolError
from kvpool.request.events import EventBatch
from kvpool.wire import fence
from kvpool.wire.auth import recheck
from kvpool.wire.convert_events import batch_to_pb
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import events_pb2_grpc as rpc
from kvpool.wire.status import code_of

TAKE_LIMIT_S = 60.0
"""Longest a consumer may take to read one batch."""


class EventsHandler(Protocol):
    """What a node tells of the blocks it holds. Raises kvpool errors."""

    @property
    def identity(self) -> NodeIdentity:
        """Who answers; calls meant for somebody else are refused."""
        ...

    def watch(self, incarnation: int, sequence: int) -> AsyncGenerator[EventBatch, None]:
        """Batches for a consumer that has all up to `sequence` of the life `incarnation` (0: nothing), without end.

        A batch at least every `KEEPALIVE_S`, be it empty. `UnavailableError` when there are too many consumers, or the node stops.
        """
        ...


def add_events(server: grpc.aio.Server, handler: EventsHandler) -> None:
    """Register `handler` on `server`."""
    rpc.add_EventsServicer_to_server(_Servicer(handler), server)


class _Servicer(rpc.EventsServicer):
    def __init__(self, handler: EventsHandler) -> None:
        self._handler = handler

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        try:
            fence.check(context.invocation_metadata(), self._handler.identity, needed=False)
            async with aclosing(self._handler.watch(request.incarnation, request.sequence)) as batches:
                async for batch in batches:
                    recheck()
                    await _write(context, batch_to_pb(batch))
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))


async def _write(context: grpc.aio.ServicerContext, message: Any) -> None:
    limit = asyncio.timeout(TAKE_LIMIT_S)
    try:
        async with limit:
            await context.write(message)
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineError(f"nothing was read for {TAKE_LIMIT_S:.0f} s") from error
        raise
