"""Which passes a prefill takes, and how long a recomputation would: the arithmetic around the model, without it.

Chunk boundaries are absolute multiples of the chunk size, wherever the cached prefix ends. So two runs that miss the same
tail of a prompt run the same passes, and equal passes over equal caches give equal bits.
"""

from itertools import pairwise

from kvpool.units import MS, SECOND

LOAD_FLOOR_NS = 250 * MS
"""A load may always take this long, however little it would cost to compute."""
_MEMORY_TOKENS = 4096
_SHORT = 16


def chunk_plan(start: int, end: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The passes that compute tokens [start, end): cut at multiples of `chunk_tokens`, none empty."""
    cuts = [start, *range((start // chunk_tokens + 1) * chunk_tokens, end, chunk_tokens), end]
    return list(pairwise(cuts)) if start < end else []


class Rate:
    """Prefill speed in tokens per second: a mean in which the last few thousand tokens count."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._ns = 0.0

    def add(self, tokens: int, took_ns: int) -> None:
        """`tokens` were computed in one pass of `took_ns`. Short passes say nothing about a prefill and don't count."""
        if tokens < _SHORT:
            return
        fade = max(0.0, 1.0 - tokens / _MEMORY_TOKENS)
        self._tokens = self._tokens * fade + tokens
        self._ns = self._ns * fade + took_ns

    @property
    def tokens_per_s(self) -> float:
        """0 when nothing was measured."""
        return self._tokens / self._ns * SECOND if self._ns else 0.0

    def load_budget_ns(self, tokens: int) -> int:
        """How long loading `tokens` may take before computing them would have been faster (nothing measured: the floor)."""
        return max(LOAD_FLOOR_NS, round(tokens * self._ns / self._tokens)) if self._tokens else LOAD_FLOOR_NS
