"""How many bytes each tenant's blocks may take. What they do take is counted where blocks come and go (`blocks.py`)."""

from collections.abc import Mapping

from kvpool.errors import ConfigError
from kvpool.pool.limits import PoolLimits
from kvpool.pool.values import Quota


class Quotas:
    """Limits by tenant; `used` is the live count of their bytes."""

    __slots__ = ("_limits", "_used", "max_bytes")

    def __init__(self, used: Mapping[str, int], limits: PoolLimits) -> None:
        self._used = used
        self._limits = limits
        self.max_bytes: dict[str, int] = {}

    def set(self, tenant: str, max_bytes: int | None) -> None:
        """Limit a tenant ("": what was written without one) from now on; None lifts the limit. Raises `ConfigError`."""
        if len(tenant) > self._limits.max_owner_chars:
            raise ConfigError(f"a tenant's name has at most {self._limits.max_owner_chars} characters, got {len(tenant)}")
        if max_bytes is None:
            self.max_bytes.pop(tenant, None)
            return
        if max_bytes < 0:
            raise ConfigError(f"a quota can't be negative, got {max_bytes}")
        if tenant not in self.max_bytes and len(self.max_bytes) >= self._limits.max_quotas:
            raise ConfigError(f"{len(self.max_bytes)} tenants have a quota, which is the limit: remove one first")
        self.max_bytes[tenant] = max_bytes

    def allow(self, tenant: str, size: int) -> bool:
        """Whether the tenant may take `size` bytes more."""
        quota = self.max_bytes.get(tenant)
        return quota is None or self._used.get(tenant, 0) + size <= quota

    def all(self) -> dict[str, Quota]:
        """Tenants that have blocks or a quota, by name."""
        return {name: Quota(self._used.get(name, 0), self.max_bytes.get(name)) for name in sorted({*self._used, *self.max_bytes})}
