"""The in-memory twin passes the kit, so it can stand in for the real ones."""

import numpy as np
import pytest

from kvpool.testing.reach_kit import WINDOW_BYTES, FarSide, ReachKit
from kvpool.transport import MemoryNode, MemoryReach, Reach
from kvpool.transport.reach import Bytes
from kvpool.units import MIB


class MemoryFar:
    """`FarSide` in this process."""

    offset = MIB
    lease_id = 0
    outlives_owner = False
    serves_frozen = False

    def __init__(self, arena: Bytes) -> None:
        self.node = MemoryNode(arena)
        self.arena_bytes = arena.size
        self.window: Bytes = arena[self.offset : self.offset + WINDOW_BYTES]
        self.freeze, self.thaw, self.kill = self.node.freeze, self.node.thaw, self.node.kill

    def open(self) -> Reach:
        return MemoryReach(self.node)


@pytest.fixture(scope="module")
def arena() -> Bytes:
    return np.zeros(WINDOW_BYTES + 2 * MIB, np.uint8)


class TestMemoryReach(ReachKit):
    """Dies and hangs like a remote node."""

    @pytest.fixture
    def far(self, arena: Bytes) -> FarSide:
        return MemoryFar(arena)
