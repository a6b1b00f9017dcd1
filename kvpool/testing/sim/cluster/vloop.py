"""Virtual time for real asyncio code: an event loop whose clock jumps, and processes that can be frozen and killed.

Theory. The shells of nodes and clients (asking in rounds, writing to all targets, the balancer) are asyncio code and run here as they are.
When nothing is ready the loop's clock jumps to the next timer. Every callback belongs to the *process* named by its context. While that
process is frozen its callbacks are put aside and run when it goes on, in their order, as after SIGSTOP and SIGCONT; those of a killed
process wait for ever, so no `finally` of it runs, as after kill -9.

What production runs in worker threads runs here in one piece at its own moment. A blocking call in it that has to wait takes *debt*: the
thread's clock goes on, and its result comes when the loop's clock has caught up.

A run is a function of its seed: tasks and futures hash by their number, so that the order of a set of them is the same on every machine.
"""

import asyncio
import gc
import heapq
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, TypeVar

from kvpool.units import SECOND

T = TypeVar("T")

_PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)
_NOWHERE = Context()
"""The context of what belongs to no process: messages under way, faults."""
WALL_START_NS = 1_700_000_000 * SECOND
_PURGE = 4096


class Process:
    """One life of one process: `name` is where the network finds it, `host` the machine it shares memory with."""

    def __init__(self, loop: "VirtualLoop", name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.alive = True
        self.frozen = False
        self.troubled_ns = -(1 << 62)
        """Until when it was last frozen, or cut off from the store."""
        self._loop = loop
        self._parked: list[asyncio.Handle] = []
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)

    @property
    def running(self) -> bool:
        """Whether its code runs now."""
        return self.alive and not self.frozen

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run `work` as a task of this process."""
        return self._loop.create_task(work, context=self.context.copy())

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT: whatever came due meanwhile runs now."""
        self.frozen = False
        self.troubled_ns = max(self.troubled_ns, self._loop.now_ns)
        self._release()

    def kill(self) -> None:
        """SIGKILL."""
        self.alive = False

    def park(self, handle: asyncio.Handle) -> None:
        """Keep a callback for later."""
        self._parked.append(handle)

    def bury(self) -> None:
        """The world is over: let what was put aside run, so that every task can end."""
        self.alive, self.frozen = True, False
        self._release()

    def _release(self) -> None:
        if self.alive:
            for handle in self._parked:
                self._loop.resume(handle)
            self._parked.clear()


def current_process() -> Process:
    """Whose code runs."""
    process = _PROCESS.get()
    assert process is not None
    return process


class _Task(asyncio.Task[Any]):
    number = 0

    def __hash__(self) -> int:
        return self.number


class _Future(asyncio.Future[Any]):
    number = 0

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.BaseEventLoop):
    """`now_ns` is the time, `events` what the world counts; `run` runs up to a number of those, or a time."""

    def __init__(self, rng: Random, thread_ns: int) -> None:
        super().__init__()
        self.now_ns = 0
        self.events = 0
        self.trouble = ""
        """What ends the run early, once it is set."""
        self._rng = rng
        self._thread_ns = thread_ns
        self._debt_ns = 0
        self._numbers = 0
        self._tasks: dict[_Task, None] = {}
        self._max_events = 0
        self._until_ns = 0
        self.set_task_factory(self._new_task)  # type: ignore[arg-type]

    def run(self, *, events: int = 1 << 62, until_ns: int = 1 << 62) -> None:
        """Run until `events` have been counted in all, it is `until_ns`, or there is trouble."""
        self._max_events, self._until_ns = events, until_ns
        if not self.trouble and self.events < events and self.now_ns < until_ns:
            self.run_forever()

    def clock_ns(self) -> int:
        """The time as the code that runs sees it."""
        return self.now_ns + self._debt_ns

    def owe_until(self, time_ns: int) -> None:
        """The thread that runs has waited until then."""
        self._debt_ns = max(self._debt_ns, time_ns - self.now_ns)

    def later(self, delay_ns: int, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` in `delay_ns`, whoever is frozen or dead by then."""
        self.call_later(delay_ns / SECOND, action, *arguments, context=_NOWHERE)

    def resume(self, handle: asyncio.Handle) -> None:
        """Run a callback that was put aside."""
        self._ready.append(handle)  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Cancel every task and let them end, then close."""
        for _ in range(50):
            self.trouble = ""
            left = [task for task in self._tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.run(until_ns=self.now_ns + SECOND)
        self.close()

    # What asyncio asks of a loop

    def time(self) -> float:
        """Seconds."""
        return self.now_ns / SECOND

    def create_future(self) -> "asyncio.Future[Any]":
        """A future with a number."""
        future = _Future(loop=self)
        future.number = self._next()
        return future

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        """Run `func` in one piece a moment from now, as a thread of the process that asks."""
        future = self.create_future()

        def work() -> None:
            if future.cancelled():
                return
            result: T | None = None
            failure: BaseException | None = None
            try:
                result = func(*args)
            except Exception as error:
                failure = error
            debt_ns, self._debt_ns = self._debt_ns, 0
            self.call_later(debt_ns / SECOND, tell, result, failure)

        def tell(result: T | None, failure: BaseException | None) -> None:
            if not future.done():
                if failure is None:
                    future.set_result(result)
                else:
                    future.set_exception(failure)

        self.call_later(self._rng.random() * self._thread_ns / SECOND, work)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What a callback raised is a defect of the simulation or of what it runs."""
        error = context.get("exception")
        if error is not None and "never retrieved" not in context.get("message", ""):
            self.trouble = self.trouble or f"{type(error).__name__}: {error}"

    def _run_once(self) -> None:
        ready: Any = self._ready  # type: ignore[attr-defined]
        if not ready:
            self._jump(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            process = handle._context.get(_PROCESS)
            if process is not None and not process.running:
                process.park(handle)
                continue
            handle._run()
            if self.trouble or self.events >= self._max_events:
                self._stopping = True
                return

    def _jump(self, ready: Any) -> None:
        """Nothing is ready: go to the next timer, or stop."""
        timers: Any = self._scheduled  # type: ignore[attr-defined]
        if self._timer_cancelled_count > _PURGE and 2 * self._timer_cancelled_count > len(timers):  # type: ignore[has-type]
            for handle in timers:
                handle._scheduled = not handle._cancelled
            timers[:] = [handle for handle in timers if not handle._cancelled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if not timers or timers[0]._when * SECOND > self._until_ns:
            self.now_ns = max(self.now_ns, min(self._until_ns, 1 << 61) if self._until_ns < 1 << 61 else self.now_ns)
            self._stopping = True
            return
        when = timers[0]._when
        self.now_ns = max(self.now_ns, round(when * SECOND))
        while timers and timers[0]._when <= when:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            if handle._cancelled:
                self._timer_cancelled_count -= 1
            else:
                ready.append(handle)

    def _new_task(self, loop: Any, coro: Coroutine[Any, Any, T], context: Context | None = None) -> "asyncio.Task[T]":
        task = _Task(coro, loop=self, context=context)
        task.number = self._next()
        self._tasks[task] = None
        if len(self._tasks) > _PURGE:
            self._tasks = {task: None for task in self._tasks if not task.done()}
        return task

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers

    def _process_events(self, event_list: Any) -> None:
        """There are no files to watch."""

    def _write_to_self(self) -> None:
        """There is no other thread to be woken by."""


@contextmanager
def virtual_time(loop: VirtualLoop) -> Iterator[None]:
    """During the block `time` tells the loop's time, and nothing is logged: a world full of faults would have much to say."""
    before, disabled = (time.monotonic_ns, time.time_ns), logging.root.manager.disable
    logging.disable()
    time.monotonic_ns = loop.clock_ns
    time.time_ns = lambda: WALL_START_NS + loop.clock_ns()
    collecting = gc.isenabled()
    gc.disable()  # a collection would end forgotten coroutines at a moment that no seed decides
    try:
        yield
    finally:
        time.monotonic_ns, time.time_ns = before
        logging.disable(disabled)
        if collecting:
            gc.enable()
            gc.collect()
