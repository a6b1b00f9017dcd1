"""Which block leaves first: one policy a file, all behind `EvictionPolicy`, chosen by name with `make_policy`."""

from kvpool.policy.eviction.contract import DEFAULT_PRIORITY, NEVER_NS, Arrival, EvictionPolicy
from kvpool.policy.eviction.prefix_lru import PrefixLru
from kvpool.policy.eviction.registry import POLICIES, make_policy

__all__ = ["DEFAULT_PRIORITY", "NEVER_NS", "POLICIES", "Arrival", "EvictionPolicy", "PrefixLru", "make_policy"]
