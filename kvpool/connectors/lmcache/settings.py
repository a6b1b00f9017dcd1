"""What an operator says in `adapter_params`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from kvpool.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`pool`: a cluster URL (`redis://...`) or node addresses (`host:port[,host:port...]`).

    `scope`: whose values these are, beside what LMCache's keys say: one word for each set of weights and kind of engine. `transport`:
    `auto`, `shm`, `ucx`, `tcp` or `grpc`. `timeout_s`: the longest that one task waits for the pool; then it is a miss. `ttl_s`: seconds
    after which values leave (0: never). `waiting`: tasks of one kind that may wait, more are misses at once. Raises `ConfigError`.
    """

    pool: str
    scope: str = ""
    transport: str = "auto"
    timeout_s: float = 5.0
    ttl_s: float = 0.0
    waiting: int = 64

    def __post_init__(self) -> None:
        if not all(isinstance(text, str) for text in (self.pool, self.scope, self.transport)) or not self.pool:
            raise ConfigError('"pool", "scope" and "transport" are texts, "pool" such as "redis://10.0.0.1" or "10.0.0.7:7400"')
        if not _number(self.timeout_s) or self.timeout_s <= 0 or not _number(self.ttl_s) or self.ttl_s < 0:
            raise ConfigError('"timeout_s" is a number of seconds above 0, "ttl_s" one from 0')
        if type(self.waiting) is not int or self.waiting < 1:
            raise ConfigError('"waiting" is a whole number of tasks from 1')

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """From `adapter_params`. Raises `ConfigError`, also for a name that isn't known."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in params if name not in known]
        if unknown or "pool" not in params:
            what = f"doesn't know {', '.join(map(repr, unknown))}" if unknown else 'needs "pool"'
            raise ConfigError(f"the adapter_params of kvpool.connectors.lmcache: it {what}; there are {', '.join(known)}")
        return cls(**params)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
