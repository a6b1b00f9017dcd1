"""Requests that are refused before any worker has done something for them."""

from kvpool.errors import KvpoolError

REASONS = ("queue_full", "slo_ttft", "slo_tpot")


class RefusedError(KvpoolError):
    """Not now: the answer is 429 with `Retry-After`. `reason` is one of `REASONS`."""

    def __init__(self, reason: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


def after_s(seconds: float) -> int:
    """When to come back, as `Retry-After` spells it: whole seconds, 1 to 60."""
    return min(60, max(1, int(seconds + 0.999)))
