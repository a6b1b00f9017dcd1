"""Threads that transfer, and page-aligned memory for them.

Theory. O_DIRECT wants page-aligned memory, and frames in an arena are aligned to 64 bytes only, so bytes pass through a fixed set of
staging buffers. A lane spends its time inside a system call, a hash or a copy, all of which release the GIL; depth comes from several
lanes. With no lanes everything runs in the calling thread, in order: what a simulation wants.

Writes and reads have lanes of their own, so that a long put does not hold up a get, and neither waits for a buffer that something queued
behind it holds."""

import mmap
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np

from kvpool.clock import Clock
from kvpool.tier.pages import Bytes, ask_for_huge_pages
from kvpool.tier.ssd.disk import PAGE
from kvpool.units import MIB, SECOND

T = TypeVar("T")
R = TypeVar("R")

STAGE_BYTES: Final = MIB
"""Bytes of data that one staging buffer takes; it has two pages more, for the parts of pages around them."""
MAX_WAIT_S: Final = 60.0
"""The longest wait for a lock or a buffer, whatever the deadline."""


def patience(clock: Clock, deadline_ns: int) -> float:
    """Seconds to wait for something until `deadline_ns` of `clock`, at most `MAX_WAIT_S`."""
    return min(MAX_WAIT_S, max(0, deadline_ns - clock.now_ns()) / SECOND)


def aligned(nbytes: int) -> Bytes:
    """Page-aligned zeroed memory, at least one byte; freed with the last view of it."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class Lanes:
    """`count` threads for writes and `count` for reads, a staging buffer for each and two more; 0: no threads, two buffers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, "kvpool-ssd-read") if count else None
        self._writes = ThreadPoolExecutor(count, "kvpool-ssd-write") if count else None
        self._stages: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self.stages = 2 * count + 2
        size = STAGE_BYTES + 2 * PAGE
        memory = aligned(self.stages * size)
        ask_for_huge_pages(memory)  # the kernel pins fewer of them for each transfer
        for at in range(0, memory.size, size):
            self._stages.put(memory[at : at + size])

    def take(self, timeout: float) -> Bytes | None:
        """A staging buffer, to be given back; None when none was free within `timeout` seconds."""
        try:
            return self._stages.get(timeout=timeout)
        except queue.Empty:
            return None

    def give(self, stage: Bytes) -> None:
        """A buffer from `take` is free again."""
        self._stages.put(stage)

    def start(self, work: Callable[[], R]) -> "Future[R]":
        """Run a write in a lane, or now without lanes; what it raises comes out of the future (now without lanes).

        It must wait for no other."""
        if self._writes is not None:
            return self._writes.submit(work)
        done: Future[R] = Future()
        done.set_result(work())
        return done

    def each(self, work: Callable[[T], R], things: Sequence[T]) -> list[R]:
        """`work` of every thing, several at once, in any order; results in order. The first exception comes out after all have ended."""
        if self._pool is None or len(things) < 2:
            return [work(thing) for thing in things]
        results: list[R | None] = [None] * len(things)
        todo = iter(range(len(things)))  # next() of it is atomic

        def run() -> None:
            for index in todo:
                results[index] = work(things[index])

        running = [self._pool.submit(run) for _ in range(min(self.count, len(things)))]
        failures = [error for future in running if (error := future.exception()) is not None]
        if failures:
            raise failures[0]
        return results  # type: ignore[return-value]

    def close(self) -> None:
        """End the threads, after what they do now; doesn't wait for them."""
        for pool in (self._pool, self._writes):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
