"""What `--hicache-storage-backend-extra-config` says to this backend, checked: an unknown or wrong entry is an error that says what to do.

| key | meaning | default |
|---|---|---|
| `pool` | `host:port[,host:port...]` or a cluster URL (`redis://...`) | needed |
| `interface_v1` | SGLang's own: 1 moves pages between the pool and the host memory without a copy in between | 0 |
| `transport` | `auto`, `shm`, `ucx`, `tcp` or `grpc` | `auto` |
| `timeout_s` | longest that one call waits for the pool, seconds | 5 |
| `scope` | text that keeps this deployment's pages apart: a revision of the weights, a kind of fp8 | none |
| `ttl_s` | seconds after which pages leave the pool, 0 for never | 0 |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvpool.client.choose import AUTO
from kvpool.errors import ConfigError

TRANSPORTS = (AUTO, "shm", "ucx", "tcp", "grpc")
_WHERE = "--hicache-storage-backend-extra-config"
_SGLANGS = {
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "file_storage_path",
    "tp_lcm_size",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
}
"""What SGLang reads itself and leaves in the mapping, or did in some version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See the table above."""

    pool: str
    interface_v1: bool = False
    transport: str = AUTO
    timeout_s: float = 5.0
    scope: str = ""
    ttl_s: float = 0.0

    @classmethod
    def parse(cls, extra: Mapping[str, Any] | None) -> Self:
        """The settings that `extra` spells. Raises `ConfigError`."""
        given = {name: value for name, value in (extra or {}).items() if name not in _SGLANGS}
        for name in given:
            if name not in cls.__slots__:
                raise ConfigError(f"{_WHERE}: {name!r} is not known; what is: {', '.join(cls.__slots__)}")
        pool = given.get("pool")
        if not isinstance(pool, str) or not pool.strip():
            raise ConfigError(f'{_WHERE}: say where the pool is, {{"pool": "host:port"}} or {{"pool": "redis://host:port/0"}}')
        if given.get("transport", AUTO) not in TRANSPORTS:
            raise ConfigError(f"{_WHERE}: transport is {given['transport']!r}; choose {', '.join(TRANSPORTS)}")
        if not isinstance(given.get("scope", ""), str):
            raise ConfigError(f"{_WHERE}: scope is {given['scope']!r}; write text")
        for name, low, high in (("timeout_s", 0.01, 600.0), ("ttl_s", 0.0, 1e9)):
            value = given.get(name, low)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise ConfigError(f"{_WHERE}: {name} is {value!r}; write a number from {low:g} to {high:g}")
        return cls(interface_v1=bool((extra or {}).get("interface_v1", 0)), **given)
