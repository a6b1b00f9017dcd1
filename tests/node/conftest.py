"""One node's core over a small arena and twins of its tiers, without a wire."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockKey, Framer, Geometry, LayerSpec, Namespace
from kvpool.clock import MonotonicClock
from kvpool.node.handler import NodeHandler
from kvpool.node.tiers import Tiers
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import PoolState
from kvpool.pool.allocator import Allocator, aligned
from kvpool.pool.flow import FlowSettings
from kvpool.request.pool import Outcome, Reservation
from kvpool.tier import Arena
from kvpool.tier.memory import MemoryTier
from kvpool.tier.region import BytesRegion

GEOMETRY = Geometry((LayerSpec("full", 1, 8, 8),), 16, "float32")
FRAMER = Framer(Namespace(model="m", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none"))
LENGTH = FRAMER.frame_bytes(16)
SIZE = aligned(LENGTH)


@dataclass
class Rig:
    """A node's parts, and the few things tests do with them."""

    state: PoolState
    arena: Arena
    tiers: Tiers
    handler: NodeHandler
    below: MemoryTier | None
    beside: MemoryTier | None

    async def put(self, keys: Sequence[BlockKey], *, tenant: str = "", patience_s: float = 5.0) -> list[Outcome]:
        """Store a chain of good frames whose payload is the key's first byte."""
        blocks = [Reservation(key, keys[i - 1] if i else b"", 16 * i, LENGTH) for i, key in enumerate(keys)]
        lease_id, grants = await self.handler.reserve("w", 10_000, blocks, tenant=tenant, patience_s=patience_s)
        wrote: list[bytes] = []
        for i, (key, (outcome, offset)) in enumerate(zip(keys, grants, strict=True)):
            if outcome is Outcome.GRANTED:
                frame = self.handler.window(lease_id, offset, LENGTH, write=True)
                frame[:] = key[0]
                FRAMER.stamp(frame, key, keys[i - 1] if i else FRAMER.root, 16)
                wrote.append(key)
        assert all(self.handler.commit(lease_id, wrote))
        return [outcome for outcome, _ in grants]

    async def get(self, keys: Sequence[BlockKey], *, patience_s: float = 5.0) -> list[bool]:
        """Which blocks can be read whole and right."""
        lease_id, places = await self.handler.acquire("r", 10_000, keys, patience_s=patience_s)
        good: list[bool] = []
        for key, place in zip(keys, places, strict=True):
            if place is not None:
                payload = FRAMER.open(self.handler.window(lease_id, *place, write=False), key).payload
                assert np.all(payload == key[0])
            good.append(place is not None)
        self.handler.release(lease_id, ())
        self.state.check()
        return good


def chain(name: str, count: int) -> list[BlockKey]:
    """A chain's keys."""
    return [BlockKey(sha256(f"{name}/{i}".encode()).digest()) for i in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something has happened."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def twin(nbytes: int, name: str = "memory") -> MemoryTier:
    """A tier in this process's memory."""
    return MemoryTier(BytesRegion(nbytes), Allocator(nbytes), PrefixLru(), name=name)


class Rigs:
    """Makes rigs and stops them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: list[Rig] = []

    def __call__(self, blocks: int, *, below: int = 0, beside: int = 0, settings: FlowSettings | None = None) -> Rig:
        arena = Arena.create(self._directory, f"{len(self._made):032x}", 1, blocks * SIZE)
        state, clock = PoolState(arena.capacity, PrefixLru()), MonotonicClock()
        low, fast = twin(below * SIZE) if below else None, twin(beside * SIZE, "gpu") if beside else None
        tiers = Tiers(state, arena, clock, below=low, beside=fast, settings=settings or FlowSettings())
        tiers.start()
        handler = NodeHandler(state, arena, clock, node_id="0" * 32, incarnation=1, tiers=tiers)
        self._made.append(Rig(state, arena, tiers, handler, low, fast))
        return self._made[-1]

    async def stop(self) -> None:
        for rig in self._made:
            await rig.tiers.stop()
            rig.state.check()
            rig.arena.close()


@pytest.fixture
async def rigs(tmp_path: Path) -> AsyncIterator[Rigs]:
    """`rigs(blocks, below=, beside=)` makes a node's parts; stopped afterwards."""
    made = Rigs(tmp_path)
    yield made
    await made.stop()
