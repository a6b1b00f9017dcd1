"""Policies by name, as configuration and benches call them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvpool.errors import ConfigError
from kvpool.policy.eviction.clock import Clock
from kvpool.policy.eviction.contract import EvictionPolicy
from kvpool.policy.eviction.lfu import Lfu
from kvpool.policy.eviction.lru import Lru
from kvpool.policy.eviction.prefix_lru import PrefixLru
from kvpool.policy.eviction.priority import Priority
from kvpool.policy.eviction.s3fifo import S3Fifo
from kvpool.policy.eviction.slru import Slru
from kvpool.policy.eviction.temporal import Temporal
from kvpool.policy.eviction.ttl import Ttl
from kvpool.policy.eviction.value import ReuseValue

POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy]]] = MappingProxyType(
    {
        "lru": Lru,
        "prefix-lru": PrefixLru,
        "clock": Clock,
        "s3fifo": S3Fifo,
        "lfu": Lfu,
        "slru": Slru,
        "priority": Priority,
        "ttl": Ttl,
        "temporal": Temporal,
        "value": ReuseValue,
    }
)
"""Name: maker of a fresh policy, in the order to show them."""


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy called `name`. Raises `ConfigError` for a name not in `POLICIES`."""
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"no eviction policy is called {name!r}; choose one of {', '.join(POLICIES)}")
    return make()
