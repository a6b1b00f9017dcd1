"""What outlives a node's process: the disk its slower tier is on, and how that tier is opened in each life."""

from random import Random
from typing import TYPE_CHECKING

from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.sim.disk import DiskFaults, SimDisk
from kvpool.testing.sim.marks import Coverage
from kvpool.testing.sim.world import World, stream
from kvpool.tier.contract import Tier
from kvpool.tier.memory import MemoryTier
from kvpool.tier.region import BytesRegion
from kvpool.units import MS

if TYPE_CHECKING:
    from kvpool.testing.sim.node import Node


class Ground:
    """One world's disk."""

    def __init__(self, world: World, coverage: Coverage) -> None:
        self.world = world
        self.coverage = coverage
        self.disk = SimDisk(2 * world.below.capacity_bytes, stream(world.seed, "disk"))
        self._rng = stream(world.seed, "power")

    def open(self, node: "Node") -> Tier:
        """The slower tier of a new life."""
        capacity = self.world.below.capacity_bytes
        return MemoryTier(
            BytesRegion(capacity), Allocator(capacity), PrefixLru(), clock=node, wall_ms=lambda: node.wall_ns() // MS, max_objects=64
        )

    def by_power(self) -> bool:
        """Whether a death inside the tier is a loss of power."""
        return self._rng.random() < 0.5

    def trouble(self, name: str, rng: Random) -> None:
        """Begin one of `TROUBLES`."""
        faults, chance = self.disk.faults, rng.choice((0.1, 0.5, 1.0))
        if name == "bit flip":
            self.disk.flip_bit()
        elif name == "die inside":
            faults.crash_in = rng.randint(1, 40)
        elif name in ("full", "read-only"):
            setattr(faults, name.replace("-", "_"), True)
        else:
            setattr(faults, name.replace(" ", "_"), chance)

    def heal(self) -> None:
        """All troubles end."""
        self.disk.faults = DiskFaults()

    def fall(self, *, power: bool) -> None:
        """The process died: what the disk makes of it."""
        if power:
            self.coverage.hit("power lost")
            self.disk.lose_power()
        else:
            self.disk.kill()
