"""Transfers in threads: what is left where the kernel's own asynchronous transfers can't be had."""

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvpool.tier.ssd.disk import Piece


class PooledTransfers:
    """See `Transfers`. `carry_out` does one transfer, writing or reading, and gives an errno; up to `depth` threads call it."""

    def __init__(self, depth: int, carry_out: Callable[[Piece, bool], int]) -> None:
        self._pool = ThreadPoolExecutor(depth, "kvpool-ssd-transfer")
        self._carry_out = carry_out
        self._over: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._going = 0

    def start(self, tag: int, piece: Piece, *, writing: bool) -> None:
        """Hand it to a thread."""
        self._pool.submit(lambda: self._over.put((tag, self._carry_out(piece, writing))))
        self._going += 1

    def ended(self, *, wait: bool) -> list[tuple[int, int]]:
        """See `Transfers.ended`."""
        over: list[tuple[int, int]] = []
        while self._going and (not self._over.empty() or (wait and not over)):
            over.append(self._over.get())
            self._going -= 1
        return over

    def close(self) -> None:
        """See `Transfers.close`."""
        self._pool.shutdown(wait=False)
