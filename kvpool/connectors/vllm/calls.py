"""One call to the pool from a rank: it ends exactly once, by its result or because it is given up, and copies nothing after that."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvpool.clock import seconds_left
from kvpool.units import SECOND

log = logging.getLogger(__name__)

GRACE_NS = 2 * SECOND
"""The pool's client ends a call at its deadline or a moment after."""


class LateError(Exception):
    """A copy that came after its call was given up."""


class Call:
    """`ended(count)` is told once; before it, `settle` makes sure that all copies are in place. `deadline_ns` is monotonic."""

    def __init__(self, deadline_ns: int, ended: Callable[[int], None], settle: Callable[[], None] | None = None) -> None:
        self._limit_ns = deadline_ns + GRACE_NS
        self._ended, self._settle = ended, settle
        self._claim = threading.Lock()
        self._over = threading.Event()

    def follow(self, future: "Future[int]") -> None:
        """Its result ends the call."""
        future.add_done_callback(self._done)

    def check(self) -> None:
        """Raise `LateError` once the call is over: to be asked around each copy."""
        if self._claim.locked():
            raise LateError("a copy came after its call was given up")

    def wait(self) -> None:
        """Return when it is over, within its deadline or a moment after."""
        if not self._over.wait(seconds_left(self._limit_ns)):
            self.end(0)

    def give_up(self, now_ns: int) -> None:
        """End it with nothing if it is past its time."""
        if now_ns > self._limit_ns:
            self.end(0)

    def end(self, count: int) -> None:
        """End it, if it hasn't."""
        if self._claim.acquire(blocking=False):
            self._ended(count)
            self._over.set()

    def _done(self, future: "Future[int]") -> None:
        count = result_of(future)
        if count and self._settle is not None:
            try:
                self._settle()
            except Exception:
                log.exception("blocks couldn't be copied into the engine's memory")
                count = 0
        self.end(count)


def result_of(future: "Future[int]") -> int:
    """The result of a future that is done; 0 for one that failed."""
    return 0 if future.cancelled() or future.exception() is not None else future.result()
