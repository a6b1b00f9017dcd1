"""Every memory tier passes the contract of a tier: the twin, the shared one, and the GPU's over CPU tensors."""

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.noncoherent import NonCoherentShim, memory_of
from kvpool.testing.tier_kit import TierKit
from kvpool.tier import DEFAULT_DIRECTORY
from kvpool.tier.contract import Tier
from kvpool.tier.gpu import GpuRegion
from kvpool.tier.memory import MemoryTier
from kvpool.tier.region import BytesRegion, Region
from kvpool.tier.shared import open_shared_tier
from kvpool.tier.shared.opening import share
from kvpool.tier.shared.table import table_bytes
from kvpool.units import KIB


class MemoryWorld:
    """Tiers over regions of one kind; damage is done to the region's bytes."""

    self_evicting = False
    smallest_bytes = 64 * KIB

    def __init__(self) -> None:
        self.tiers: list[Tier] = []

    def region(self, capacity: int) -> Region:
        """A new region."""
        return BytesRegion(capacity)

    def open(self, capacity_bytes: int, max_objects: int = 1024) -> Tier:
        """A tier over a new region."""
        tier = MemoryTier(self.region(capacity_bytes), Allocator(capacity_bytes), PrefixLru(), max_objects=max_objects)
        self.tiers.append(tier)
        return tier

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        """Through the same region, so that every cache on the way is of one mind: the bytes are wrong at the source."""
        assert isinstance(tier, MemoryTier)
        held = tier._index.get(key)
        assert held is not None
        byte = np.zeros(1, np.uint8)
        at = held.offset + held.entry.length // 2
        tier._region.read(at, byte)
        tier._region.write(at, byte ^ np.uint8(16))
        tier._region.flush(at, 1)

    def close(self) -> None:
        """Close what was made."""
        for tier in self.tiers:
            tier.close()


class SharedWorld(MemoryWorld):
    """Tiers in files on shared memory, each with its slot table."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def open(self, capacity_bytes: int, max_objects: int = 1024) -> Tier:
        """A tier in a new file."""
        path = self.directory / f"{len(self.tiers)}.shared"
        tier = open_shared_tier(
            path, capacity_bytes, "5e" * 16, 1, space=Allocator(capacity_bytes), policy=PrefixLru(), max_objects=max_objects
        )
        self.tiers.append(tier)
        return tier


class ShimWorld(MemoryWorld):
    """Shared tiers behind a cache that nobody keeps alike."""

    def open(self, capacity_bytes: int, max_objects: int = 1024) -> Tier:
        """A tier over a view of memory of its own."""
        region = NonCoherentShim(memory_of(table_bytes(max_objects) + capacity_bytes), random.Random(len(self.tiers)))
        space = Allocator(capacity_bytes)
        tier = share(region, capacity_bytes, bytes(16), 1, space=space, policy=PrefixLru(), max_objects=max_objects)
        self.tiers.append(tier)
        return tier


class TestTwin(TierKit):
    @pytest.fixture
    def world(self) -> Iterator[MemoryWorld]:
        world = MemoryWorld()
        yield world
        world.close()


class GpuWorld(MemoryWorld):
    """Over a tensor, with staging buffers small enough that most records need several."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def region(self, capacity: int) -> Region:
        """A new tensor."""
        return GpuRegion(capacity, self.device, staging_bytes=4 * KIB, lanes=2)


class TestGpuOverCpuTensors(TierKit):
    @pytest.fixture
    def world(self) -> Iterator[GpuWorld]:
        pytest.importorskip("torch")
        world = GpuWorld("cpu")
        yield world
        world.close()


@pytest.mark.gpu
class TestGpu(TierKit):
    @pytest.fixture
    def world(self) -> Iterator[GpuWorld]:
        if not pytest.importorskip("torch").cuda.is_available():
            pytest.skip("no CUDA device")
        world = GpuWorld("cuda")
        yield world
        world.close()


class TestShared(TierKit):
    @pytest.fixture
    def world(self) -> Iterator[SharedWorld]:
        with tempfile.TemporaryDirectory(dir=DEFAULT_DIRECTORY) as directory:
            world = SharedWorld(Path(directory))
            yield world
            world.close()
            assert list(Path(directory).iterdir()) == []


class TestSharedOverTheShim(TierKit):
    @pytest.fixture
    def world(self) -> Iterator[ShimWorld]:
        world = ShimWorld()
        yield world
        world.close()
