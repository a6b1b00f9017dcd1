"""How much per second: a token bucket that may go into debt, and one pair of them per tenant. Pure; time is an argument.

A call is let in when its tenant may make one more and owes no bytes, and pays afterwards what it really cost. So a large call is never
cut in two, and the calls behind it wait until the debt is paid: over time the rate holds exactly.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.units import SECOND

BURST_S = 1.0
"""How many seconds' worth may be taken at once."""
MAX_TENANTS = 4096
"""Tenants whose rate is remembered; the one that was idle longest is forgotten first, which forgives it at most one burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What a tenant may: bytes held per node, calls and bytes per second and process; 0: no limit."""

    max_bytes: int = 0
    requests_per_s: float = 0.0
    bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 63:
                raise ConfigError(f"{name} must be a number of 0 (no limit) or more, got {value!r}")


NO_LIMITS = TenantLimits()


class Bucket:
    """Fills by `per_s` every second up to `burst`, starts full; 0 `per_s`: never empty."""

    def __init__(self, per_s: float, now_ns: int) -> None:
        self.per_s = per_s
        self.burst = max(1.0, per_s * BURST_S)
        self._level = self.burst
        self._at_ns = now_ns

    def wait_ns(self, now_ns: int, needed: float = 0.0) -> int:
        """How long until more than nothing, and at least `needed` (no more than a burst), is there to take; 0: now."""
        if not self.per_s:
            return 0
        self._fill(now_ns)
        if self._level > 0 and self._level >= needed:
            return 0
        return int((needed - self._level) / self.per_s * SECOND) + 1

    def take(self, amount: float, now_ns: int) -> None:
        """Pay."""
        if self.per_s:
            self._fill(now_ns)
            self._level -= amount

    def _fill(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._at_ns)  # a clock that goes back gives nothing and takes nothing
        self._level = min(self.burst, self._level + self.per_s * passed_ns / SECOND)
        self._at_ns = max(self._at_ns, now_ns)


class Rates:
    """The buckets of all tenants; `limits` says what one may now, and a changed limit starts a fresh bucket."""

    def __init__(self, limits: Callable[[str], TenantLimits]) -> None:
        self._limits = limits
        self._buckets: OrderedDict[str, tuple[TenantLimits, Bucket, Bucket]] = OrderedDict()

    def admit(self, tenant: str, now_ns: int) -> int:
        """One call of `tenant` comes: 0 when it may go on (it is counted), else the nanoseconds to wait."""
        calls, nbytes = self._of(tenant, now_ns)
        wait_ns = max(calls.wait_ns(now_ns, needed=1.0), nbytes.wait_ns(now_ns))
        if not wait_ns:
            calls.take(1, now_ns)
        return wait_ns

    def paid(self, tenant: str, nbytes: int, now_ns: int) -> None:
        """A call of `tenant` moved, or got the right to move, `nbytes`."""
        self._of(tenant, now_ns)[1].take(nbytes, now_ns)

    def _of(self, tenant: str, now_ns: int) -> tuple[Bucket, Bucket]:
        limits = self._limits(tenant)
        known = self._buckets.get(tenant)
        if known is None or known[0] != limits:
            known = limits, Bucket(limits.requests_per_s, now_ns), Bucket(limits.bytes_per_s, now_ns)
            self._buckets[tenant] = known
            if len(self._buckets) > MAX_TENANTS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(tenant)
        return known[1], known[2]
