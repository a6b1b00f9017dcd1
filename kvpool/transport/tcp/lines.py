"""The connections of one reach: a few, opened when they are first needed, each used by one thread at a time.

    open ──close()──▶ closed ──▶ ClosedError from then on

A connection whose use raised is dropped, and the next call dials another one: a deadline that was missed costs its own call and nobody
else's. One call uses one connection: on one host two streams side by side were slower than one (2.4 against 2.8 GB/s, two cores), so a
second one is there for a second thread.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpool.clock import seconds_left
from kvpool.errors import ClosedError, DeadlineError
from kvpool.transport.tcp.line import Line


class Lines:
    """At most `limit` lines, made by `dial(deadline_ns)`; thread-safe."""

    def __init__(self, dial: Callable[[int], Line], limit: int) -> None:
        self._dial = dial
        self._turns = threading.Semaphore(limit)
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._closed = False
        self._process = os.getpid()

    @contextmanager
    def line(self, deadline_ns: int) -> Iterator[Line]:
        """A line to use in the block. Raises `ClosedError`, `DeadlineError` and what dialling raises."""
        self.require_open()
        if not self._turns.acquire(timeout=seconds_left(deadline_ns)):
            raise DeadlineError("the deadline passed while other transfers to this node were under way")
        try:
            line = self._take(deadline_ns)
            try:
                yield line
            except BaseException as error:
                self._drop(line)
                if self._closed:
                    raise ClosedError("this reach was closed") from error
                raise
            self._give_back(line)
        finally:
            self._turns.release()

    def require_open(self) -> None:
        """Raise `ClosedError` once closed."""
        if self._closed:
            raise ClosedError("this reach is closed; open another one")

    def close(self) -> None:
        """Hang up and end calls under way; twice is fine. In a forked child the connections are the parent's and only let go."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            if os.getpid() == self._process:
                for line in self._busy:
                    line.abort()
        for line in idle:
            line.close()

    def _take(self, deadline_ns: int) -> Line:
        with self._lock:
            self.require_open()
            if self._idle:
                line = self._idle.pop()
                self._busy.add(line)
                return line
        line = self._dial(deadline_ns)
        with self._lock:
            if not self._closed:
                self._busy.add(line)
                return line
        line.close()
        raise ClosedError("this reach was closed")

    def _give_back(self, line: Line) -> None:
        with self._lock:
            self._busy.discard(line)
            if not self._closed:
                self._idle.append(line)
                return
        line.close()

    def _drop(self, line: Line) -> None:
        with self._lock:
            self._busy.discard(line)
        line.close()
