"""An event loop whose time jumps instead of passing: what waits longest costs nothing, and runs are the same every time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.DefaultSelector):
    """A selector that, with nothing to do until some time, makes it that time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Never waits."""
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits for something that nothing will bring about")
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, and a `Clock` of it. No threads, no sockets."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.now_s

    def now_ns(self) -> int:
        """Virtual nanoseconds."""
        return round(self._jump.now_s * 1e9)


def run_virtual(work: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `work(loop)` to its end on a fresh virtual loop."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
