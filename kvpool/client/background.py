"""Work that nobody waits for: kept from being collected half done, and given a bounded time when the client closes."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any


class Background:
    """The tasks of one client on its event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self, timeout_s: float) -> None:
        """Wait for what runs, for `timeout_s` at most; what is left is cancelled."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()


async def outlast(work: "asyncio.Future[Any]") -> None:
    """Wait for the end of `work` however often the waiting task is cancelled: a thread uses memory that is let go of after this."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])
