"""How long a load is waited for: no longer than computing the same tokens would take, judged again as blocks come. Pure.

Theory. A load that has brought nothing yet may take as long as computing all its tokens would (and always a little while: the first
request of an idle worker shouldn't give up on a pool that only has to wake up). Once blocks come, what is left is judged by itself: when
its tokens will at the pace so far take longer to load than to compute, the rest of the range is given up, and what has come is kept.
"""

from kvpool.engine.prefill import LOAD_FLOOR_NS

_TRUSTED = 4
"""Blocks after which the pace says something."""


class Patience:
    """A load of `tokens` tokens in `blocks` blocks that began at `began_ns`; computing them takes about `compute_ns`."""

    def __init__(self, *, blocks: int, began_ns: int, compute_ns: int, deadline_ns: int) -> None:
        self._blocks = blocks
        self._began_ns = began_ns
        self._compute_ns = compute_ns
        self.end_ns = min(deadline_ns, began_ns + max(LOAD_FLOOR_NS, compute_ns))
        """When the load is given up at the latest."""

    def lost(self, arrived: int, now_ns: int) -> bool:
        """Whether to give up, when `arrived` blocks have come."""
        if now_ns >= self.end_ns:
            return True
        spent_ns = now_ns - self._began_ns
        if arrived < _TRUSTED or spent_ns < LOAD_FLOOR_NS:
            return False
        left = self._blocks - arrived
        return spent_ns * left // arrived > self._compute_ns * left // self._blocks
