"""What outlives a node's process: the disk its slower tier is on, and how that tier is opened in each life.

Theory. The tier below waits seconds for a failing device to come back; a world lasts for a fraction of one. So the tier's clock runs
`SPEED` times as fast as the world's, and slow disk calls move it on.
"""

from random import Random
from typing import TYPE_CHECKING

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.sim.disk import DiskFaults, SimDisk
from kvpool.testing.sim.marks import Coverage
from kvpool.testing.sim.world import SEGMENT_BYTES, World, stream
from kvpool.tier.contract import Tier
from kvpool.tier.memory import MemoryTier
from kvpool.tier.region import BytesRegion
from kvpool.tier.ssd.tier import SsdTier
from kvpool.units import MS

if TYPE_CHECKING:
    from kvpool.testing.sim.node import Node

SPEED = 200
_FLIPS = 6


class TierClock:
    """Monotonic time as the tier below has it."""

    def __init__(self, node: "Node", disk: SimDisk) -> None:
        self._loop = node.loop
        self._disk = disk

    def now_ns(self) -> int:
        """Later after every slow call."""
        return self._loop.now_ns * SPEED + self._disk.lost_ns


class Ground:
    """One world's disk."""

    def __init__(self, world: World, coverage: Coverage) -> None:
        self.world = world
        self.coverage = coverage
        self.given: dict[BlockKey, dict[int, None]] = {}
        """Per block the xxh3_64 of all bytes that a tier was ever given for it."""
        self._rng = stream(world.seed, "power")
        room = world.below.capacity_bytes + SEGMENT_BYTES
        self.disk = SimDisk(room, stream(world.seed, "disk"))

    def open(self, node: "Node") -> Tier:
        """The slower tier of a new life. Raises `ConfigError` when the disk can't be read."""
        draw = self.world.below
        clock = TierClock(node, self.disk)

        def wall_ms() -> int:
            return node.wall_ns() // MS

        if draw.kind == "memory":
            space = Allocator(draw.capacity_bytes)
            region = BytesRegion(draw.capacity_bytes)
            return MemoryTier(region, space, PrefixLru(), clock=clock, wall_ms=wall_ms, max_objects=draw.max_objects)
        return SsdTier(
            self.disk,
            capacity_bytes=draw.capacity_bytes,
            incarnation=node.identity.incarnation,
            segment_bytes=SEGMENT_BYTES,
            max_objects=draw.max_objects,
            lanes=0,
            clock=clock,
            wall_ms=wall_ms,
        )

    def by_power(self) -> bool:
        """Whether a death inside the tier is a loss of power."""
        return self._rng.random() < 0.5

    def trouble(self, name: str, rng: Random) -> None:
        """Begin one of `TROUBLES`."""
        faults, chance = self.disk.faults, rng.choice((0.1, 0.5, 1.0))
        if name == "bit flip":
            for _ in range(_FLIPS):
                self.disk.flip_bit()
        elif name == "die inside":
            faults.crash_in = rng.randint(1, 6)
        elif name == "slow":
            faults.slow_ns = int(chance * self.world.below.transfer_ns * SPEED)
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
