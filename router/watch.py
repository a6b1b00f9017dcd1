"""A worker's stream of events, under observation.

A dead worker breaks the connection and is noticed at once. A stopped or wedged one is only silent, and so is a healthy one that
computes a long prompt behind a queue. Silence alone therefore proves nothing: after `stall_timeout_s` of it, or as soon as the
worker has left the cluster's view, the worker is asked how many requests it is busy with. No answer means failed, and so does "none"
after a whole period of silence: it has lost this one. Any other answer buys another period: before the first event as many
as the request's deadline allows, after it `_SILENCES`, since a stream that has begun has no reason to pause for long.

How. An event is awaited by whoever wants it, with nothing in between: tokens are many. One timer a stream looks once a second, and asks in
a task of its own. A worker that is given up is a cancellation of that wait, taken back at once, as `asyncio.timeout` does it.
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
    """Judges one stream of one worker."""

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
        self._waiting: asyncio.Task[object] | None = None
        self._heard_ns = 0
        self._events = self._silences = 0
        self._verdict: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None

    async def events(self, stream: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """The events of `stream`; closing this closes it. Raises `UnavailableError` (silent) or `DeadlineError` besides its errors."""
        try:
            self._look()
            while True:
                task = asyncio.current_task()
                assert task is not None, "a stream is read by a task"
                before = task.cancelling()
                self._heard_ns, self._silences, self._waiting = self._clock.now_ns(), 0, task
                try:
                    event = await anext(stream)
                except BaseException as error:
                    why = self._why(error, task, before)
                    if isinstance(why, StopAsyncIteration):
                        return
                    if why is error:
                        raise
                    raise why from error
                finally:
                    self._waiting = None
                self._events += 1
                yield event
        finally:
            await self._end()
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    def _look(self) -> None:
        """Once a second, and when a period of silence or the request's time is over: is all well?"""
        now_ns = self._clock.now_ns()
        wait_ns = int(_SLICE_S * SECOND)
        if self._waiting is not None and self._verdict is None and self._asking is None:
            stalled = now_ns - self._heard_ns >= self._stall_ns
            if now_ns >= self._deadline_ns:
                self._give_up(DeadlineError(f"the request's deadline passed while {self._name} worked on it"))
            elif stalled or not self._present():
                self._asking = asyncio.create_task(self._ask(self._events, stalled=stalled))
            else:
                wait_ns = min(wait_ns, self._heard_ns + self._stall_ns - now_ns)
        wait_ns = min(wait_ns, max(SECOND // 1000, self._deadline_ns - now_ns))
        self._timer = asyncio.get_running_loop().call_later(wait_ns / SECOND, self._look)

    async def _ask(self, event: int, *, stalled: bool) -> None:
        """What the worker says while `event` is waited for; nothing if it comes meanwhile."""
        try:
            await asyncio.sleep(0)  # what came in this very moment has come
            if self._waits_for(event):
                load = await self._load()
                self._silences += stalled
                if self._waits_for(event):
                    self._judge(load, stalled=stalled)
                    self._heard_ns = self._clock.now_ns() if stalled else self._heard_ns
        except Exception as error:
            if self._waits_for(event):
                self._give_up(error)
        finally:
            self._asking = None

    def _waits_for(self, event: int) -> bool:
        return self._waiting is not None and self._events == event

    def _judge(self, load: int | None, *, stalled: bool) -> None:
        """Raise when the worker's answer, or lack of one, means that nothing more will come."""
        if load is None:
            raise UnavailableError(f"{self._name} has gone silent and does not answer")
        if stalled and load == 0:
            raise UnavailableError(f"{self._name} has lost the request: it says it is busy with none")
        if self._events and self._silences >= _SILENCES:
            raise UnavailableError(f"{self._name} answers but its stream has stopped")

    def _give_up(self, error: Exception) -> None:
        """End the wait with `error`."""
        self._verdict = error
        if self._waiting is not None:
            self._waiting.cancel()

    def _why(self, error: BaseException, task: "asyncio.Task[object]", before: int) -> BaseException:
        """What a wait that failed with `error` means: our verdict, somebody's cancellation of the request, or an error of the call."""
        if self._verdict is not None:
            return self._verdict if task.uncancel() <= before else asyncio.CancelledError()
        if isinstance(error, asyncio.CancelledError) and task.cancelling() <= before:
            return UnavailableError(f"the call to {self._name} was cancelled under us")
        return error

    async def _end(self) -> None:
        """Look and ask no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
