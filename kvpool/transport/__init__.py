"""HOW bytes move between a client and one node's arena: shared memory, UCX, and the in-memory twin."""

from kvpool.transport.memory import MemoryNode, MemoryReach
from kvpool.transport.offer import ShmOffer, UcxOffer, host_boot_id, same_host
from kvpool.transport.reach import Reach, Run, merge_runs
from kvpool.transport.shm import ShmReach

__all__ = ["MemoryNode", "MemoryReach", "Reach", "Run", "ShmOffer", "ShmReach", "UcxOffer", "host_boot_id", "merge_runs", "same_host"]
