"""What moved, counted as SGLang's metrics want it: pages and GB/s of each call, by way, since somebody asked last."""

import threading
from collections import deque
from typing import Any, Final

from kvpool.units import SECOND

WAYS: Final = ("prefetch", "backup")
_KEPT: Final = 4096
"""Calls that are remembered at most, of each way; the oldest go."""


class Traffic:
    """Counts of calls; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = {way: deque[tuple[int, float]](maxlen=_KEPT) for way in WAYS}

    def add(self, way: str, pages: int, nbytes: int, took_ns: int) -> None:
        """One call of `way` moved so many pages and bytes."""
        if pages:
            with self._lock:
                self._calls[way].append((pages, nbytes / (1 << 30) * SECOND / max(took_ns, 1)))

    def drain_into(self, metrics: Any) -> Any:
        """Append what is remembered to the lists `WAY_pgs` and `WAY_bandwidth` of `metrics`, and forget it."""
        with self._lock:
            for way, calls in self._calls.items():
                getattr(metrics, f"{way}_pgs").extend(pages for pages, _ in calls)
                getattr(metrics, f"{way}_bandwidth").extend(rate for _, rate in calls)
                calls.clear()
        return metrics
