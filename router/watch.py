"""A worker's stream of events, under observation.

A dead worker breaks the connection and is noticed at once. A stopped or wedged one is only silent, and so is a healthy one that
computes a long prompt behind a queue. Silence alone therefore proves nothing: after `stall_timeout_s` of it, or as soon as the
worker has left the cluster's view, the worker is asked how many requests it is busy with. No answer means failed, and so does "none"
after a whole period of silence: it has lost this one. Any other answer buys another period: before the first event as many
as the request's deadline allows, after it `_SILENCES`, since a stream that has begun has no reason to pause for long.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TypeVar

from kvpool.clock import Clock
from kvpool.errors import DeadlineError, UnavailableError
from kvpool.units import SECOND

T = TypeVar("T")

_SILENCES = 3
_SLICE_S = 1.0


class Watch:
    """How to judge one worker's silence."""

    def __init__(
        self,
        *,
        name: str,
        clock: Clock,
        stall_timeout_s: float,
        deadline_ns: int,
        present: Callable[[], bool],
        load: Callable[[], Awaitable[int | None]],
    ) -> None:
        """`present` says whether the cluster still lists the worker, `load` asks the worker for its requests (None: no answer)."""
        self._name = name
        self._clock = clock
        self._stall_ns = int(stall_timeout_s * SECOND)
        self._deadline_ns = deadline_ns
        self._present = present
        self._load = load

    async def events(self, stream: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """The events of `stream`; closing this closes it. Raises `UnavailableError` (silent) or `DeadlineError` besides its errors."""
        started = False
        try:
            while True:
                step = asyncio.ensure_future(_step(stream))
                try:
                    await self._settle(step, started)
                    if step.cancelled():  # not by us: then `_settle` would have raised
                        raise UnavailableError(f"the call to {self._name} was cancelled under us")
                    found = step.result()
                finally:
                    await _end(step)
                if not found:
                    return
                started = True
                yield found[0]
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    async def _settle(self, step: "asyncio.Future[tuple[T, ...]]", started: bool) -> None:
        """Return when `step` is done; raise when the worker is given up."""
        heard_ns = self._clock.now_ns()
        silences = 0
        while not step.done():
            now_ns = self._clock.now_ns()
            if now_ns >= self._deadline_ns:
                raise DeadlineError(f"the request's deadline passed while {self._name} worked on it")
            stalled = now_ns - heard_ns >= self._stall_ns
            if stalled or not self._present():
                load = await self._load()
                silences += stalled
                if not step.done():
                    self._judge(load, stalled=stalled, worn_out=started and silences >= _SILENCES)
                if stalled:
                    heard_ns = self._clock.now_ns()
            left_s = min(self._deadline_ns, heard_ns + self._stall_ns) - self._clock.now_ns()
            await asyncio.wait({step}, timeout=min(_SLICE_S, max(0.001, left_s / SECOND)))

    def _judge(self, load: int | None, *, stalled: bool, worn_out: bool) -> None:
        """Raise when the worker's answer, or lack of one, means that nothing more will come."""
        if load is None:
            raise UnavailableError(f"{self._name} has gone silent and does not answer")
        if stalled and load == 0:
            raise UnavailableError(f"{self._name} has lost the request: it says it is busy with none")
        if worn_out:
            raise UnavailableError(f"{self._name} answers but its stream has stopped")


async def _end(step: "asyncio.Future[tuple[T, ...]]") -> None:
    """Cancel `step` if it still runs, and wait until it has let go of its call."""
    if not step.done():
        step.cancel()
        await asyncio.wait({step})
    if not step.cancelled():
        step.exception()  # seen here, or already raised; never "never retrieved"


async def _step(stream: AsyncIterator[T]) -> tuple[T, ...]:
    """The next event, or nothing at the end."""
    try:
        return (await anext(stream),)
    except StopAsyncIteration:
        return ()
