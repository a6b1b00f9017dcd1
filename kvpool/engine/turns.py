"""Whose turn it is on the compute thread: decode steps and prefill chunks share it.

Theory. Work is taken in rounds: a prefill chunk, then one step of every decode that waits when the chunk has ended. Both
kinds queue first come, first served, and whoever wants more queues again. So between two of its tokens a decode waits for
at most one chunk and one step of each of the others (and one that asks while a chunk runs comes before the next chunk),
and a prefill gets a chunk per round. Pure: no threads, no clock; the jobs are anything that can be compared.
"""

import enum
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Kind(enum.Enum):
    """What a job is."""

    CHUNK = "chunk"
    STEP = "step"


class Turns(Generic[T]):
    """The jobs that wait."""

    def __init__(self) -> None:
        self._waiting: dict[Kind, deque[T]] = {Kind.CHUNK: deque(), Kind.STEP: deque()}
        self._steps_left = 0
        self._after_chunk = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, kind: Kind, job: T) -> None:
        """`job` wants a turn."""
        self._waiting[kind].append(job)

    def discard(self, job: T) -> bool:
        """Forget `job`; False when it doesn't wait (any more)."""
        for kind, queue in self._waiting.items():
            if job in queue:
                if kind is Kind.STEP and queue.index(job) < self._steps_left:
                    self._steps_left -= 1
                queue.remove(job)
                return True
        return False

    def next(self) -> T | None:
        """The job whose turn it is, taken out; None when none waits."""
        chunks, steps = self._waiting[Kind.CHUNK], self._waiting[Kind.STEP]
        if self._after_chunk:
            self._steps_left, self._after_chunk = len(steps), False
        if chunks and not self._steps_left:
            self._after_chunk = True
            return chunks.popleft()
        if not steps:
            return None
        self._steps_left = max(0, self._steps_left - 1)
        return steps.popleft()
