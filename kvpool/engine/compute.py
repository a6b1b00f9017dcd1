"""The one thread that runs the model. Coroutines hand it jobs and wait; first come, first served.

A job that waits is withdrawn when its coroutine is cancelled; one that runs is waited for (at most one pass), so
after a cancellation nothing writes to its blocks any more.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from kvpool.clock import seconds_left
from kvpool.errors import ClosedError, KvpoolError, LocalError

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran(Generic[T]):
    """What a job returned, how long it waited for its turn and how long it took."""

    value: T
    waited_ns: int
    took_ns: int


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[Ran[Any]]"
    asked_ns: int = field(default_factory=time.monotonic_ns)


class ComputeThread:
    """Runs jobs one at a time, with `threads` cores each. Close it; it is not a daemon."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="kvpool-compute")
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> Ran[T]:
        """Run `work` when its turn comes. Raises what it raises; an error that isn't kvpool's becomes a `LocalError`."""
        loop = asyncio.get_running_loop()
        job = _Job(work, loop, loop.create_future())
        with self._changed:
            if self._closed:
                raise ClosedError("the engine was closed")
            self._jobs.append(job)
            self._changed.notify()
        try:
            return await asyncio.shield(job.done)
        except asyncio.CancelledError:
            with self._changed:
                waits = job in self._jobs
                if waits:
                    self._jobs.remove(job)
            if not waits:
                await _ended(job.done)
            raise

    async def close(self, deadline_ns: int) -> bool:
        """Refuse further jobs, fail those that wait, let the running one end. False if it hasn't by `deadline_ns`."""
        with self._changed:
            self._closed = True
            while self._jobs:
                job = self._jobs.popleft()
                job.done.set_exception(ClosedError("the engine was closed"))
            self._changed.notify()
        await asyncio.to_thread(self._thread.join, seconds_left(deadline_ns))
        return not self._thread.is_alive()

    def _main(self) -> None:
        torch.set_num_threads(self._threads)  # here, because the setting belongs to the calling thread
        while True:
            with self._changed:
                while not self._jobs:
                    if self._closed:
                        return
                    self._changed.wait()
                job = self._jobs.popleft()
            self._execute(job)
            del job  # or the last job's sequence would stay in memory

    def _execute(self, job: _Job) -> None:
        began_ns = time.monotonic_ns()
        try:
            value = job.work()
        except KvpoolError as error:
            self._answer(job, job.done.set_exception, error)
        except Exception as error:
            log.exception("a pass of the model failed")
            self._answer(job, job.done.set_exception, LocalError(f"a pass of the model failed: {error}"))
        else:
            ended_ns = time.monotonic_ns()
            self._answer(job, job.done.set_result, Ran(value=value, waited_ns=began_ns - job.asked_ns, took_ns=ended_ns - began_ns))

    def _answer(self, job: _Job, set_: Callable[[Any], None], value: object) -> None:
        try:
            job.loop.call_soon_threadsafe(set_, value)
        except RuntimeError:
            log.warning("the event loop was closed while a pass of the model ran; its result is dropped")


async def _ended(future: "asyncio.Future[Any]") -> None:
    """Wait until `future` is done, whatever cancels us meanwhile (a pass of the model can't be interrupted)."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # looked at: nobody else will
