"""The connections of one reach: a few, opened when they are first needed, each used by one thread at a time.

    open ──close()──▶ closed ──▶ ClosedError from then on

A connection whose use raised is dropped, and the next call dials another one: a deadline that was missed costs its own call and nobody
else's. One call uses one connection: on one host two streams side by side were slower than one (2.4 against 2.8 GB/s, two cores), so a
second one is there for a second thread.
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType

from kvpool.clock import seconds_left
from kvpool.errors import ClosedError, DeadlineError
from kvpool.transport.tcp.line import Line


class Lines:
    """At most `limit` lines, made by `dial(deadline_ns)`; thread-safe."""

    def __init__(self, dial: Callable[[int], Line], limit: int) -> None:
        self._dial = dial
        self._limit = limit
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._waiting = 0
        self._idle: list[Line] = []
        self._busy: set[Line] = set()
        self._count = 0  # idle, busy and being dialled
        self._closed = False
        self._process = os.getpid()

    def line(self, deadline_ns: int) -> "_Turn":
        """A line to use in a `with` block. Raises `ClosedError`, `DeadlineError` and what dialling raises."""
        return _Turn(self, self._take(deadline_ns) or self._open(deadline_ns))

    def done(self, line: Line, error: BaseException | None) -> None:
        """The end of a turn. Raises `ClosedError` when it failed because this was closed."""
        if error is None:
            self._give_back(line)
            return
        self._drop(line)
        if self._closed:
            raise ClosedError("this reach was closed") from error

    def require_open(self) -> None:
        """Raise `ClosedError` once closed."""
        if self._closed:
            raise ClosedError("this reach is closed; open another one")

    def close(self) -> None:
        """Hang up and end calls under way; twice is fine. In a forked child the connections are the parent's and only let go."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            mine = os.getpid() == self._process
            for line in self._busy if mine else ():
                line.abort()
            self._freed.notify_all()
        for line in idle:
            line.close(reset=mine)

    def _take(self, deadline_ns: int) -> Line | None:
        """An idle line; None when the caller is to dial another one."""
        with self._lock:
            while True:
                self.require_open()
                if self._idle:
                    line = self._idle.pop()
                    self._busy.add(line)
                    return line
                if self._count < self._limit:
                    self._count += 1
                    return None
                self._wait(deadline_ns)

    def _wait(self, deadline_ns: int) -> None:
        self._waiting += 1
        try:
            if not self._freed.wait(seconds_left(deadline_ns)):
                raise DeadlineError("the deadline passed while other transfers to this node were under way")
        finally:
            self._waiting -= 1

    def _open(self, deadline_ns: int) -> Line:
        try:
            line = self._dial(deadline_ns)
        except BaseException:
            self._forget(None)
            raise
        with self._lock:
            self._busy.add(line)
            if not self._closed:
                return line
        self._drop(line)
        raise ClosedError("this reach was closed")

    def _give_back(self, line: Line) -> None:
        with self._lock:
            if not self._closed:
                self._busy.discard(line)
                self._idle.append(line)
                if self._waiting:
                    self._freed.notify()
                return
        self._drop(line)

    def _drop(self, line: Line) -> None:
        self._forget(line)
        line.close()

    def _forget(self, line: Line | None) -> None:
        """There is one less."""
        with self._lock:
            if line is not None:
                self._busy.discard(line)
            self._count -= 1
            self._freed.notify()


class _Turn:
    """One use of a line."""

    __slots__ = ("_line", "_lines")

    def __init__(self, lines: Lines, line: Line) -> None:
        self._lines, self._line = lines, line

    def __enter__(self) -> Line:
        return self._line

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lines.done(self._line, error)
