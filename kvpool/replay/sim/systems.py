"""What belongs to a policy besides its ranking: where blocks live, whether they are fetched, in which order its engines compute.

Each gets what its authors document. Those without a pool have each node's own cache. Mooncake's blocks stay where they were computed, are
copied to the decode node by the hand-off and to whoever pulls them, and may be pulled from any node. Ours live with their owner by
rendezvous over all nodes, as in production (`kvpool.policy.placement`).
"""

from dataclasses import dataclass, replace

from kvpool.policy.routing import OURS, Policy, WorkerOrder, make_policy

HELP_TOKENS = 16384
"""A decode node prefills what lacks at most so many, where that is quicker: `help_tokens` of our router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A policy and what comes with it.

    `pulls`: workers load from other nodes. `placed`: blocks live with their owners, else where they were computed. `single_flight`: what
    another request is computing may be waited for. `help_tokens`: decode nodes may prefill what lacks at most so many. `eviction`: a name
    of `kvpool.policy.eviction`.
    """

    name: str
    policy: Policy
    pulls: bool = False
    placed: bool = False
    single_flight: bool = False
    help_tokens: int = 0
    order: WorkerOrder = WorkerOrder.ARRIVAL
    eviction: str = "prefix-lru"


def make_system(name: str, seed: int = 0) -> System:
    """The system whose policy is called `name`. Raises `ConfigError` for an unknown name."""
    system = System(name=name, policy=make_policy(name, seed))
    if name == "mooncake":
        return replace(system, pulls=True)
    if name == OURS:
        return replace(
            system,
            pulls=True,
            placed=True,
            single_flight=True,
            order=WorkerOrder.SHORTEST,
            help_tokens=HELP_TOKENS,
        )
    return system
