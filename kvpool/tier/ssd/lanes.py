"""Threads that write, and page-aligned memory for them.

Theory. O_DIRECT wants page-aligned memory, and frames in an arena are aligned to 64 bytes only, so bytes pass through a fixed set of
staging buffers. A lane spends its time inside a system call, a hash or a copy, all of which release the GIL; depth comes from several
lanes. With no lanes everything runs in the calling thread, in order: what a simulation wants.

Writes have lanes of their own, so that whatever else needs one never waits behind a long put. Reads need none: see `reader`."""

import mmap
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np

from kvpool.clock import Clock
from kvpool.tier.pages import Bytes, ask_for_huge_pages
from kvpool.units import MIB, SECOND

T = TypeVar("T")
R = TypeVar("R")

STAGE_BYTES: Final = MIB
"""Bytes of one staging buffer, and of one write at most."""
MAX_WAIT_S: Final = 60.0
"""The longest wait for a lock or a buffer, whatever the deadline."""
_HUGE: Final = 2 * MIB


def patience(clock: Clock, deadline_ns: int) -> float:
    """Seconds to wait for something until `deadline_ns` of `clock`, at most `MAX_WAIT_S`."""
    return min(MAX_WAIT_S, max(0, deadline_ns - clock.now_ns()) / SECOND)


def aligned(nbytes: int) -> Bytes:
    """Page-aligned zeroed memory, at least one byte; freed with the last view of it. Private, for shared memory gets no huge pages."""
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def staging(count: int, nbytes: int) -> list[Bytes]:
    """`count` page-aligned buffers of `nbytes`, whole pages, in huge pages where there are any: a transfer from small pages has a segment
    for each, and a device takes few of those at once."""
    memory = aligned(count * nbytes + _HUGE)
    first = -memory.ctypes.data % _HUGE
    memory = memory[first : first + count * nbytes]
    ask_for_huge_pages(memory)
    return [memory[at : at + nbytes] for at in range(0, memory.size, nbytes)]


class Lanes:
    """`count` threads for writes and `count` for all else, a staging buffer for each writer and two more; 0: no threads, two buffers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ThreadPoolExecutor(count, "kvpool-ssd") if count else None
        self._writes = ThreadPoolExecutor(count, "kvpool-ssd-write") if count else None
        self._stages: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        self.stages = count + 2
        for stage in staging(self.stages, STAGE_BYTES):
            self._stages.put(stage)

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
