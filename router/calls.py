"""Calls to workers, each seen to its end.

A call that is no longer wanted is cancelled, at once. A call that has said all it had to say is not: the worker may still be putting
its books in order, and a cancellation would look to it like a caller who hung up. Such a call is read to its end in the
background, for a limited time, while the request goes on.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvpool.errors import KvpoolError
from router.fleet import Fleet
from router.worker import Place, Worker

log = logging.getLogger("router.calls")

T = TypeVar("T")

_LINGER_S = 10.0


@dataclass(slots=True, kw_only=True)
class Call(Generic[T]):
    """A call under way."""

    events: AsyncGenerator[T, None]
    place: Place
    """To be told when the worker has computed the prompt, and of every token."""
    complete: bool = False
    """Set when the worker has said all it had to say."""


class Calls:
    """The calls of one router."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lingering: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self, worker: Worker, tokens: int, events: AsyncGenerator[T, None], *, decode_tokens: int = 0) -> AsyncIterator[Call[T]]:
        """Count the call on `worker`, with `tokens` of backlog, for the length of the block; then cancel it unless it is complete."""
        with self._fleet.busy(worker, tokens, decode_tokens=decode_tokens, sent=True) as place:
            call = Call(events=events, place=place)
            try:
                yield call
            finally:
                if call.complete:
                    self._linger(worker, events)
                else:
                    await events.aclose()

    async def close(self) -> None:
        """Wait for complete calls to end; bounded."""
        if self._lingering:
            await asyncio.wait(self._lingering)

    def _linger(self, worker: Worker, events: AsyncGenerator[T, None]) -> None:
        held = ExitStack()
        held.enter_context(self._fleet.hold(worker))
        task = asyncio.get_running_loop().create_task(_read_to_the_end(held, worker.name, events))
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)


async def _read_to_the_end(held: ExitStack, name: str, events: AsyncGenerator[T, None]) -> None:
    with held:
        try:
            async with asyncio.timeout(_LINGER_S), aclosing(events):
                async for _ in events:
                    log.debug("%s sent more after it was done", name)
        except (KvpoolError, TimeoutError) as error:
            log.warning("%s did not end a call cleanly: %s", name, error or "it took too long")
