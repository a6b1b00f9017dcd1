"""Policies by name, as configuration, benches and `kvpool replay` call them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from kvpool.errors import ConfigError
from kvpool.policy.routing.aibrix import AibrixPrefixCache
from kvpool.policy.routing.dynamo import DynamoCost
from kvpool.policy.routing.least_loaded import LeastLoaded
from kvpool.policy.routing.mooncake import MooncakeAlgorithm1
from kvpool.policy.routing.power_of_two import PowerOfTwo
from kvpool.policy.routing.random_choice import RandomChoice
from kvpool.policy.routing.round_robin import RoundRobin
from kvpool.policy.routing.session_affinity import SessionAffinity
from kvpool.policy.routing.ttft import LeastTtft
from kvpool.policy.routing.values import Policy

OURS: Final = "ttft"

POLICIES: Final[Mapping[str, Callable[[int], Policy]]] = MappingProxyType(
    {
        "random": RandomChoice,
        "round_robin": RoundRobin,
        "least_loaded": LeastLoaded,
        "power_of_two": PowerOfTwo,
        "session_affinity": SessionAffinity,
        "aibrix": AibrixPrefixCache,
        "dynamo": DynamoCost,
        "mooncake": MooncakeAlgorithm1,
        "ttft": LeastTtft,
    }
)
"""Name: maker of a fresh policy from a seed, in the order to show them."""


def make_policy(name: str, seed: int = 0) -> Policy:
    """A fresh policy called `name`; `seed` for those that draw. Raises `ConfigError` for a name not in `POLICIES`."""
    make = POLICIES.get(name)
    if make is None:
        raise ConfigError(f"no routing policy is called {name!r}; choose one of {', '.join(POLICIES)}")
    return make(seed)
