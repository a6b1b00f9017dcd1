"""Policies by name, as configuration and benches call them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvpool.errors import ConfigError
from kvpool.policy.eviction.contract import EvictionPolicy
from kvpool.policy.eviction.prefix_lru import PrefixLru

POLICIES: Final[Mapping[str, Callable[[], EvictionPolicy]]] = MappingProxyType(
    {
        "prefix-lru": PrefixLru,
    }
)
"""Name: maker of a fresh policy, in the order to show them."""


def make_policy(name: str) -> EvictionPolicy:
    """A fresh policy called `name`. Raises `ConfigError` for a name not in `POLICIES`."""
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"no eviction policy is called {name!r}; choose one of {', '.join(POLICIES)}")
    return make()
