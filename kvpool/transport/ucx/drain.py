"""Call `ucp_worker_progress` until it has nothing to do, without coming back to Python in between.

Theory. One step of progress moves at most one TCP segment, so a batch takes dozens, and each return to Python has to win the GIL again:
microseconds in an idle process, up to a switch interval (5 ms) in one that computes. The loop itself therefore runs in C. No compiler is
at hand at run time, but the C library has that loop: POSIX `lfind(key, base, &count, width, compare)` calls `compare(key, element)` until
it returns 0 or `count` elements are through. With the worker as key, `ucp_worker_progress` as comparison (it ignores the second argument)
and a width of 0, that is "progress while something moves, `count` times at most". In a process whose other threads ran Python half of
the time, it doubled the rate of 32 x 1 MiB gets.
"""

import ctypes as c
from collections.abc import Callable
from typing import Final

_STEPS: Final = 64  # so that a deadline is looked at every few milliseconds, however much comes in

_libc = c.CDLL(None)
_libc.sched_yield.restype = c.c_int
_libc.sched_yield.argtypes = []
_libc.lfind.restype = c.c_void_p
_libc.lfind.argtypes = [c.c_void_p, c.c_void_p, c.POINTER(c.c_size_t), c.c_size_t, c.c_void_p]


def make_drain(calls: c.CDLL, worker: int) -> Callable[[], bool]:
    """A function that progresses `worker` while something moves; False when nothing did."""
    progress = calls.ucp_worker_progress
    step = c.cast(progress, c.c_void_p)
    steps = c.byref(c.c_size_t(_STEPS))
    find = _libc.lfind

    def drain() -> bool:
        if not progress(worker):
            return False
        find(worker, worker, steps, 0, step)
        return True

    return drain


def give_way() -> None:
    """Between two looks at nothing: let whoever waits for this core run (the peer, on a busy host) and whoever waits for the GIL."""
    _libc.sched_yield()
