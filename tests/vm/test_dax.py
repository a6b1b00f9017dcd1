"""The shared tier and the arena on a real memory device: `/dev/dax*`, in the guest an emulated NVDIMM."""

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, FrameError, UnavailableError
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.allocator import Allocator
from kvpool.testing.shared_owner import CAPACITY, KEYS, SharedOwner, read_all
from kvpool.testing.tier_kit import TierKit, record_of, soon
from kvpool.tier import Arena, ArenaMapping
from kvpool.tier.contract import Tier
from kvpool.tier.memory import MemoryTier
from kvpool.tier.shared import SharedTierReader, open_shared_tier
from kvpool.units import KIB, MIB

DEVICES = sorted(Path("/dev").glob("dax*"))
pytestmark = pytest.mark.skipif(not DEVICES, reason="no memory device /dev/dax*; `make test-vm` boots a guest that has one")
DEVICE = DEVICES[0] if DEVICES else Path("/dev/dax0.0")
NODE = uuid.uuid4().hex
UNIT = 2 * MIB  # what the guest's device is aligned to


class DeviceWorld:
    """Tiers on the device, one after the other."""

    self_evicting = False
    smallest_bytes = 64 * KIB

    def __init__(self) -> None:
        self.tiers: list[MemoryTier] = []

    def open(self, capacity_bytes: int, max_objects: int = 1024) -> Tier:
        """The next owner's tier."""
        space = Allocator(capacity_bytes)
        tier = open_shared_tier(DEVICE, capacity_bytes, NODE, len(self.tiers) + 1, space=space, policy=PrefixLru(), max_objects=max_objects)
        self.tiers.append(tier)
        return tier

    def corrupt(self, tier: Tier, key: BlockKey) -> None:
        """One bit of the record's bytes, in the device."""
        assert isinstance(tier, MemoryTier)
        held = tier._index.get(key)
        assert held is not None
        byte = np.zeros(1, np.uint8)
        at = held.offset + held.entry.length // 2
        tier._region.read(at, byte)
        tier._region.write(at, byte ^ np.uint8(16))

    def close(self) -> None:
        """Close what was made."""
        for tier in self.tiers:
            tier.close()


class TestSharedOnDevice(TierKit):
    """The contract of a tier, on the device."""

    @pytest.fixture
    def world(self) -> Iterator[DeviceWorld]:
        world = DeviceWorld()
        yield world
        world.close()
        assert DEVICE.exists()


def test_device_shows_what_another_process_puts_and_survives_its_death() -> None:
    """Readers never ask the owner: they go on when it is killed, and see the next one start empty."""
    owner = SharedOwner(DEVICE, 1)
    reader = SharedTierReader.open(DEVICE)
    hits, until = 0, time.monotonic() + 60
    while hits < 50 and time.monotonic() < until:
        hits += read_all(reader)
    assert hits >= 50
    with pytest.raises(ConfigError, match="alive"):
        open_shared_tier(DEVICE, CAPACITY, NODE, 2, space=Allocator(CAPACITY), policy=PrefixLru(), max_objects=64)
    owner.kill()
    assert read_all(reader) <= KEYS
    successor = open_shared_tier(DEVICE, CAPACITY, NODE, 2, space=Allocator(CAPACITY), policy=PrefixLru(), max_objects=64)
    assert list(successor.entries()) == []
    assert (reader.live, read_all(reader)) == (False, 0)
    reader.close()
    assert successor.put([record_of(1)], soon()) == [True]
    with SharedTierReader.open(DEVICE) as again:
        into = np.zeros(record_of(1).data.size, np.uint8)
        assert again.get([(record_of(1).key, into)], soon()) == [True]
    successor.close()


def test_arena_on_the_device_is_mapped_by_others_and_leaves_it_there() -> None:
    """Whole units behind one for the superblock; every byte to the end; no arena any more afterwards."""
    status = DEVICE.stat()
    size = int(Path(f"/sys/dev/char/{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}/size").read_text())
    with Arena.on(DEVICE, NODE, 1, size - UNIT) as owner:
        assert (owner.superblock.data_offset, owner.data.size) == (UNIT, size - UNIT)
        owner.view(owner.capacity - 3, 3)[:] = (1, 2, 3)
        with ArenaMapping.open(DEVICE, NODE, 1) as mapping:
            assert mapping.view(owner.capacity - 3, 3).tolist() == [1, 2, 3]
            mapping.view(5, 2)[:] = (8, 9)
        assert owner.view(5, 2).tolist() == [8, 9]
        with pytest.raises(ConfigError, match="alive"):
            Arena.on(DEVICE, NODE, 2, MIB)
        with pytest.raises(UnavailableError, match="another node or incarnation"):
            ArenaMapping.open(DEVICE, NODE, 2)
    with pytest.raises(FrameError, match="magic"):
        ArenaMapping.open(DEVICE, NODE, 1)
    with pytest.raises(ConfigError, match="lower the capacity"):
        Arena.on(DEVICE, NODE, 2, size - UNIT + 1)
    Arena.on(DEVICE, NODE, 2, MIB).close()
