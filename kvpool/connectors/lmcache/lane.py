"""Tasks of one kind: done one after the other by a thread, their results kept until they are fetched, and told of by an eventfd.

A task may wait for its turn only so long, and only so many wait: beyond that its result is the one given for a task that isn't done. A task
that has begun is always waited for, because it uses memory of the caller's.
"""

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

log = logging.getLogger(__name__)
R = TypeVar("R")
_CLOSE_S = 120.0


class _Task(NamedTuple, Generic[R]):
    number: int
    until: float
    run: Callable[[], R]
    missed: Callable[[], R]


class Lane(Generic[R]):
    """`submit` tasks, wait for `fd` to be readable, then `pop` their results; for any threads. `close` it in the end.

    `waiting`: tasks that may wait. `patience_s`: for how long each. `clock`: seconds that only grow.
    """

    def __init__(self, name: str, *, waiting: int, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.given_up = 0
        """Tasks that were not done: too many, too late, failed, or left at the end."""
        self._name = name
        self._waiting = waiting
        self._patience_s = patience_s
        self._clock = clock
        self._numbers = itertools.count()
        self._tasks: deque[_Task[R]] = deque()
        self._results: dict[int, R] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._fd_open = True
        self._thread = threading.Thread(target=self._work, name=f"kvpool-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether tasks are being done."""
        return self._thread.is_alive() and not self._closed

    def submit(self, run: Callable[[], R], missed: Callable[[], R]) -> int:
        """A task: its number. Its result is that of `run`, or of `missed` where it isn't done."""
        task = _Task(next(self._numbers), self._clock() + self._patience_s, run, missed)
        with self._changed:
            if not self._closed and len(self._tasks) < self._waiting:
                self._tasks.append(task)
                self._changed.notify()
                return task.number
        self._give_up(task, "too many wait")
        return task.number

    def pop(self, number: int) -> R | None:
        """The result of a task, once."""
        with self._changed:
            return self._results.pop(number, None)

    def pop_all(self) -> dict[int, R]:
        """All results there are, once."""
        with self._changed:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """End, when the task that is being done is. Those that wait are not done. Results stay until they are fetched, `fd` is closed."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            left, self._tasks = list(self._tasks), deque()
            self._changed.notify()
        for task in left:
            self._give_up(task, "closed")
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("a %s task of the pool hasn't ended within %.0f s; its memory is still in use", self._name, _CLOSE_S)
            return
        with self._changed:
            self._fd_open = False
        os.close(self.fd)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closed)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
            if self._clock() > task.until:
                self._give_up(task, f"it waited longer than {self._patience_s:.1f} s")
                continue
            try:
                result = task.run()
            except Exception:
                log.exception("a %s task of the pool failed", self._name)
                self._give_up(task, "it failed")
                continue
            self._finish(task, result)

    def _give_up(self, task: _Task[R], why: str) -> None:
        log.debug("%s task %d is not done: %s", self._name, task.number, why)
        self.given_up += 1
        self._finish(task, task.missed())

    def _finish(self, task: _Task[R], result: R) -> None:
        with self._changed:
            self._results[task.number] = result
            if self._fd_open:
                os.eventfd_write(self.fd, 1)
