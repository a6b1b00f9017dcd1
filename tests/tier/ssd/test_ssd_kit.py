"""The SSD tier passes the contract of a tier, on a real directory with lanes and on a simulated disk without."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvpool.block import BlockKey
from kvpool.testing.sim.disk import SimDisk
from kvpool.testing.tier_kit import TierKit
from kvpool.tier.contract import Tier
from kvpool.tier.ssd import PAGE, Disk, FileDisk, Piece, SsdTier
from kvpool.tier.ssd.lanes import aligned
from kvpool.tier.ssd.scan import slot_name
from kvpool.units import KIB, MIB

SEGMENT = 256 * KIB


class SsdWorld:
    """Logs in new directories below `root`, or on simulated disks."""

    self_evicting = True
    smallest_bytes = 1 * MIB

    def __init__(self, root: Path | None) -> None:
        self.root, self.tiers = root, list[SsdTier]()

    def open(self, capacity_bytes: int, max_objects: int = 1024) -> Tier:
        """A log of small segments."""
        disk: Disk = SimDisk(2 * capacity_bytes, Random(1)) if self.root is None else FileDisk(self.root / str(len(self.tiers)))
        tier = SsdTier(
            disk,
            capacity_bytes=capacity_bytes,
            segment_bytes=SEGMENT,
            max_objects=max_objects,
            incarnation=1,
            lanes=0 if self.root is None else 4,
        )
        self.tiers.append(tier)
        return tier

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        """In the file."""
        assert isinstance(tier, SsdTier)
        pin = tier._index.pin([key])[0]
        assert pin is not None
        held, segment = pin
        tier._index.unpin([segment])
        page, at = aligned(PAGE), held.place.offset + held.entry.length // 2
        piece = Piece(slot_name(segment.slot), at - at % PAGE, page)
        assert tier._disk.read([piece]) == [0]
        page[at % PAGE] ^= np.uint8(16)
        assert tier._disk.write([piece]) == [0]


class TestFiles(TierKit):
    @pytest.fixture
    def world(self, tmp_path: Path) -> Iterator[SsdWorld]:
        world = SsdWorld(tmp_path)
        yield world
        for tier in world.tiers:
            tier.close()


class TestSimulated(TierKit):
    @pytest.fixture
    def world(self) -> Iterator[SsdWorld]:
        world = SsdWorld(None)
        yield world
        for tier in world.tiers:
            tier.close()
