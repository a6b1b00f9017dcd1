"""A token bucket: how long to wait before the next bytes may go. Pure; time is an argument.

Tokens come at a rate and gather up to a burst. A taker takes at once and goes into debt if need be; the answer says how long it must
wait until the debt is paid. So a taker of more than the burst is served too, the average holds, and takers are served in order.
"""

from kvpool.errors import ConfigError
from kvpool.units import SECOND

_BURST_S = 0.1


class TokenBucket:
    """`rate`: tokens a second. What has gathered after a rest is a tenth of a second's worth; it begins full."""

    __slots__ = ("_at_ns", "_rate", "_tokens")

    def __init__(self, rate: float, now_ns: int) -> None:
        self._rate = _checked(rate)
        self._at_ns = now_ns
        self._tokens = rate * _BURST_S

    def change(self, rate: float, now_ns: int) -> None:
        """Another rate from now on; debt stays."""
        self._settle(now_ns)
        self._rate = _checked(rate)

    def take(self, tokens: float, now_ns: int) -> int:
        """Take `tokens`; nanoseconds to wait before using them, 0 when they were there."""
        self._settle(now_ns)
        self._tokens -= tokens
        return self.debt_ns(now_ns)

    def debt_ns(self, now_ns: int) -> int:
        """How long it takes at this rate until all that was taken is paid."""
        self._settle(now_ns)
        return 0 if self._tokens >= 0 else int(-self._tokens / self._rate * SECOND)

    def _settle(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._at_ns)  # time never goes back
        self._tokens = min(self._rate * _BURST_S, self._tokens + passed_ns * self._rate / SECOND)
        self._at_ns += passed_ns


def _checked(rate: float) -> float:
    if rate <= 0:
        raise ConfigError(f"a token bucket needs a rate above 0, got {rate}")
    return rate
