"""Copying many blocks with a second thread: one core moves less than the memory can.

Both take the next block as they come to it, so a helper that gets no core, or gets it late, costs nothing but its own last block. There is
one helper a process, and it is asked only while a core has nothing to do: many clients at once have none to spare, and each goes alone. It
runs on another core than who asks, or both would take turns on one.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvpool import cores
from kvpool.units import MIB

WORTH_BYTES: Final = 4 * MIB
"""Less is copied before a helper has woken up."""


class _Helper:
    """The thread, and whether somebody uses it. A forked child begins with another one."""

    def __init__(self) -> None:
        self.busy = threading.Lock()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="kvpool-copy", initializer=self._begin)
        self.id = 0
        """Its native id, 0 until it has run."""

    def _begin(self) -> None:
        self.id = threading.get_native_id()


_helpers: list[_Helper] = []
os.register_at_fork(after_in_child=_helpers.clear)


def each(count: int, nbytes: int, step: Callable[[int], bool]) -> None:
    """Call `step(0)` .. `step(count - 1)`, each once, perhaps from two threads at once, until all are done or one answers False.

    `nbytes`: what all of them move; `step` must leave the GIL while it moves much. Back when the last has ended; raises what one raised.
    """
    numbers = iter(range(count))
    if count < 2 or nbytes < WORTH_BYTES or not cores.spare():
        _go(numbers, step)
        return
    if not _helpers:
        _helpers.append(_Helper())
    helper = _helpers[0]
    if not helper.busy.acquire(blocking=False):
        _go(numbers, step)
        return
    try:
        if helper.id and not cores.apart(helper.id):
            _go(numbers, step)
            return
        second = helper.thread.submit(_go, numbers, step)
        try:
            _go(numbers, step)
        finally:
            begun = not second.cancel()  # a helper that has had no core by now has nothing to do any more
            if begun:
                second.exception()  # waits
        if begun:
            second.result()
    finally:
        helper.busy.release()


def _go(numbers: Iterator[int], step: Callable[[int], bool]) -> None:
    """Take numbers until there are none left, nor will be; a range's iterator gives each to one thread only."""
    try:
        for number in numbers:
            if not step(number):
                break
    finally:
        for _ in numbers:
            pass
