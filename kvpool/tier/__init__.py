"""WHERE bytes sit on one node: the DRAM arena in shared memory."""

from kvpool.tier.arena import DEFAULT_DIRECTORY, Arena, ArenaMapping, reap_stale
from kvpool.tier.superblock import Superblock

__all__ = ["DEFAULT_DIRECTORY", "Arena", "ArenaMapping", "Superblock", "reap_stale"]
