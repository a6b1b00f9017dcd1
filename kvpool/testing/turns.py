"""Threads that run one at a time, in an order a seed decides: real blocking code, interleaved as finely as it asks for turns."""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.errors import DeadlineError

PATIENCE_S: Final = 60.0


class Turns:
    """`run` runs functions side by side; each calls `turn` where another may go on instead.

    Code between two turns is not interrupted, so it must not wait for what another of them holds across a turn.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._mine = threading.local()
        self._waiting: list[threading.Semaphore] = []
        self._failures: list[BaseException] = []
        self._finished = threading.Semaphore(0)

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Until all are done. Raises what the first that failed raised, and `DeadlineError` when they stand still."""
        gates = [threading.Semaphore(0) for _ in works]
        self._waiting = list(gates)
        threads = [threading.Thread(target=self._work, args=pair, daemon=True) for pair in zip(works, gates, strict=True)]
        for thread in threads:
            thread.start()
        self._next().release()
        if not self._finished.acquire(timeout=PATIENCE_S):
            raise DeadlineError(f"nobody finished within {PATIENCE_S:.0f} s")
        for thread in threads:
            thread.join(PATIENCE_S)
        if self._failures:
            raise self._failures[0]

    def turn(self) -> None:
        """Another may go on, or this one. Nothing outside `run`."""
        gate: threading.Semaphore | None = getattr(self._mine, "gate", None)
        if gate is None:
            return
        following = self._next()
        if following is not gate:
            following.release()
            self._await(gate)

    def _next(self) -> threading.Semaphore:
        return self._chance.choice(self._waiting)

    def _await(self, gate: threading.Semaphore) -> None:
        if not gate.acquire(timeout=PATIENCE_S):
            raise DeadlineError(f"no turn within {PATIENCE_S:.0f} s")

    def _work(self, work: Callable[[], None], gate: threading.Semaphore) -> None:
        try:
            self._await(gate)
            self._mine.gate = gate
            work()
        except BaseException as error:
            self._failures.append(error)
        self._mine.gate = None
        self._waiting.remove(gate)
        if self._waiting:
            self._next().release()
        else:
            self._finished.release()
