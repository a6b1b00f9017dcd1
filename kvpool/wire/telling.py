"""The asyncio half of who tells of its blocks: consumers wait for news, each at its own position, and are counted.

Nothing piles up for a consumer: it is a reader of a table that others change, and what it has not read it reads later, or anew.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Protocol

from kvpool.errors import UnavailableError
from kvpool.request.events import KEEPALIVE_S, MAX_WATCHERS, NO_PRESSURE, EventBatch, Pressure


class Reader(Protocol):
    """A consumer's position (`kvpool.pool.events.Watch`)."""

    def next(self) -> EventBatch | None:
        """The next batch, None when there is nothing new."""
        ...

    def idle(self) -> EventBatch:
        """A batch that says only where the reader is."""
        ...


class Teller:
    """Serves consumers until it is closed. Lives on one event loop."""

    def __init__(self, whose: str, reader: Callable[[int, int], Reader], *, watchers: int = MAX_WATCHERS, pulse_s: float = 0.0) -> None:
        """`whose` events, for messages; `reader` as `KvEvents.watch`; what comes within `pulse_s` of the first news goes together."""
        self._whose = whose
        self._reader = reader
        self._max_watchers = watchers
        self._pulse_s = pulse_s
        self._told: asyncio.Future[None] | None = None
        self._open = True
        self.pressure: Callable[[], Pressure] = lambda: NO_PRESSURE
        """Said with each batch."""
        self.watchers = 0
        """Consumers now."""

    async def watch(self, incarnation: int, sequence: int) -> AsyncGenerator[EventBatch, None]:
        """See `EventsHandler.watch`."""
        if self.watchers >= self._max_watchers:
            raise UnavailableError(
                f"{self.watchers} consumers watch this {self._whose} already, {self._max_watchers} at most; end one, or try later"
            )
        reader = self._reader(incarnation, sequence)
        self.watchers += 1
        try:
            while self._open:
                batch = reader.next()
                if batch is None:
                    if await self._news() and self._pulse_s:
                        await asyncio.sleep(self._pulse_s)
                    batch = reader.next() or reader.idle()
                yield replace(batch, pressure=self.pressure())
        finally:
            self.watchers -= 1
        raise UnavailableError(f"the {self._whose} stops")

    def tell(self) -> None:
        """There is something new."""
        told, self._told = self._told, None
        if told is not None and not told.done():
            told.set_result(None)

    def close(self) -> None:
        """End the consumers' streams."""
        self._open = False
        self.tell()

    async def _news(self) -> bool:
        """Wait until something was told; False when a keep-alive is due first."""
        if self._told is None:
            self._told = asyncio.get_running_loop().create_future()
        told, _ = await asyncio.wait([self._told], timeout=KEEPALIVE_S)
        return bool(told)
