"""How much of everything a pool takes, and what it does at the limit."""

from dataclasses import dataclass, fields

from kvpool.errors import ConfigError
from kvpool.units import SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Bounds of one pool; all positive, but for `fence_ns`. At the limit:

    * `max_leases`, live leases of both kinds: `acquire` answers all misses, `reserve` answers NO_SPACE; counted as refused.
    * `max_leased_blocks`, block references over all leases: the same.
    * `max_blocks_per_call`, keys or items or ranges in one call: `ConfigError`, nothing is done; split the call.
    * `max_lease_ns`, the longest lease: longer asks are cut to it; renew to hold on.
    * `max_blocks`, blocks known at once, whatever their size: as when bytes run out, evict by policy, else NO_SPACE.
    * `max_owner_chars`, the owner's name in a lease: `ConfigError`.
    * `max_pins`, live pins: a further pin is REFUSED.
    * `max_pinned_percent`, share of the capacity that hard pins may hold: a further hard pin is REFUSED.
    * `max_quotas`, tenants with a quota: `ConfigError`.
    * `max_story_keys`, keys remembered by the history: the oldest entries are forgotten.

    `fence_ns`: how long the bytes under a write lease that ran out wait before others may have them, for its writer may still be writing;
    0: not at all. A lease that is released gives them back at once.
    """

    max_leases: int = 65_536
    max_leased_blocks: int = 1 << 22
    max_blocks_per_call: int = 65_536
    max_lease_ns: int = 600 * SECOND
    max_blocks: int = 1 << 20
    max_owner_chars: int = 256
    max_pins: int = 1 << 20
    max_pinned_percent: int = 50
    max_quotas: int = 4096
    max_story_keys: int = 65_536
    fence_ns: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < (field.name != "fence_ns"):
                raise ConfigError(f"{field.name} must {'not be negative' if field.name == 'fence_ns' else 'be positive'}, got {value}")
