"""An event loop in a thread of its own, for the synchronous faces of asynchronous clients."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvpool.errors import DeadlineError

T = TypeVar("T")
_GRACE_S = 5.0


class LoopThread:
    """Runs coroutines for other threads until it is stopped. Not for calls from its own loop."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """What `work`, which is to end within `timeout_s`, comes to. Raises `DeadlineError` when it is some seconds late."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(timeout_s + _GRACE_S)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineError(f"the pool took longer than {timeout_s + _GRACE_S:.1f} s") from error

    def stop(self) -> None:
        """End the thread; nothing may run any more."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_GRACE_S)
        self.loop.close()
