"""How much of the time each worker was given work lately: seconds of it, fading by half in five minutes."""

from kvpool.policy.routing.values import WorkerRef
from kvpool.units import SECOND

HALF_LIFE_S = 300.0
_FULL_S = HALF_LIFE_S / 0.6931471805599453  # what a worker that is always given a second a second has gathered


class Recent:
    """Of all workers of one router."""

    def __init__(self) -> None:
        self._seconds: dict[WorkerRef, tuple[float, int]] = {}

    def add(self, worker: WorkerRef, seconds: float, now_ns: int) -> None:
        """`worker` has been given so much work."""
        self._seconds[worker] = self.share(worker, now_ns) * _FULL_S + seconds, now_ns

    def share(self, worker: WorkerRef, now_ns: int) -> float:
        """0: nothing lately; 1: as much as it could do."""
        seconds, at_ns = self._seconds.get(worker, (0.0, now_ns))
        faded: float = seconds * 0.5 ** (max(0, now_ns - at_ns) / (HALF_LIFE_S * SECOND))
        return faded / _FULL_S

    def forget(self, worker: WorkerRef) -> None:
        """It is gone."""
        self._seconds.pop(worker, None)
