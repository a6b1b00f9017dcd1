"""Blocks of those who wait are brought near and held, within a bound, and let go; in virtual time."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.block import chain_keys
from kvpool.errors import UnavailableError
from kvpool.request.pool import Place
from router.fleet import Fleet
from router.queue.prefetch import LEASE_MS, Prefetcher
from router.queue.warm import Warmer
from router.testing.cluster import ScriptedCluster
from router.testing.loop import VirtualLoop, run_virtual
from router.testing.workers import ScriptedWorker

BLOCK = 16
KEYS = chain_keys(b"\1" * 32, range(BLOCK * 100), BLOCK)
HERE, THERE = "host-here", "host-there"


class Node:
    """A node that grants leases and counts them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, tuple[str, ...]]] = []
        self.leases: dict[int, float] = {}
        self.down = False
        self._last = 0

    async def acquire(
        self, owner: str, lease_ms: int, keys: Sequence[bytes], timeout_s: float, *, sequence: int = 0, fetch_from: Sequence[str] = ()
    ) -> tuple[int, list[Place | None]]:
        """See `LeasePort`."""
        if self.down:
            raise UnavailableError("down")
        self.asked.append((len(keys), tuple(fetch_from)))
        self._last += 1
        self.leases[self._last] = asyncio.get_running_loop().time() + lease_ms / 1000
        return self._last, [(0, 1)] * len(keys)

    async def renew(self, lease_id: int, lease_ms: int, timeout_s: float) -> bool:
        """See `LeasePort`."""
        self.leases[lease_id] = asyncio.get_running_loop().time() + lease_ms / 1000
        return True

    async def release(self, lease_id: int, suspect: Sequence[bytes], timeout_s: float) -> None:
        """See `LeasePort`."""
        del self.leases[lease_id]

    async def close(self) -> None:
        """See `LeasePort`."""


class World:
    """Nodes on two hosts."""

    def __init__(self, max_tokens: int = 10_000) -> None:
        self.cluster = ScriptedCluster("m", block_tokens=BLOCK)
        self.nodes: dict[str, Node] = {}
        for number, host in enumerate((HERE, THERE), start=1):
            node = self.nodes[host] = Node()
            self.cluster.add("node", node, id=f"{number:032x}", info={"host": host})
        self.prefetcher = Prefetcher(self.cluster, lambda member: self.cluster.connect(member.address), max_tokens)


def run(work: Any, **options: Any) -> None:
    """Run `work(world)` in virtual time; afterwards no lease is left."""

    async def whole(loop: VirtualLoop) -> None:
        world = World(**options)
        await work(world)
        await asyncio.sleep(1)
        assert world.prefetcher.held_tokens == 0
        assert all(not node.leases for node in world.nodes.values())
        await world.prefetcher.close()

    run_virtual(whole)


def test_node_beside_the_worker_is_asked_for_all_and_fetches_from_the_owners() -> None:
    """One message does both: what its SSD has comes to memory, what others own comes as near copies."""

    async def work(world: World) -> None:
        with world.prefetcher.hold(KEYS, 10, block_tokens=BLOCK, host=THERE):
            await asyncio.sleep(1)
            assert world.nodes[HERE].asked == []
            assert sum(count for count, _ in world.nodes[THERE].asked) == 90
            assert {fetch_from for _, fetch_from in world.nodes[THERE].asked} == {(), (f"{1:032x}",)}  # its own, and the other's
            assert world.prefetcher.counts.blocks == 90
            assert world.nodes[THERE].leases

    run(work)


def test_without_a_node_there_the_owners_are_asked_each_for_its_own() -> None:
    """An unknown host: the blocks can still be brought from SSD to memory where they are."""

    async def work(world: World) -> None:
        with world.prefetcher.hold(KEYS, 0, block_tokens=BLOCK, host=""):
            await asyncio.sleep(1)
            assert sum(count for node in world.nodes.values() for count, _ in node.asked) == 100
            assert all(node.asked and not fetch_from for node in world.nodes.values() for _, fetch_from in node.asked)

    run(work)


def test_leases_are_renewed_while_somebody_waits() -> None:
    """A wait longer than a lease doesn't lose the blocks."""

    async def work(world: World) -> None:
        with world.prefetcher.hold(KEYS, 0, block_tokens=BLOCK, host=HERE):
            await asyncio.sleep(4 * LEASE_MS / 1000)
            assert all(until > asyncio.get_running_loop().time() for until in world.nodes[HERE].leases.values())
            assert world.nodes[HERE].leases

    run(work)


def test_short_waits_ask_nothing() -> None:
    """Most requests wait for milliseconds."""

    async def work(world: World) -> None:
        with world.prefetcher.hold(KEYS, 0, block_tokens=BLOCK, host=HERE):
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        assert world.nodes[HERE].asked == []

    run(work)


def test_what_is_held_is_bounded_for_all_together() -> None:
    """Held blocks can't leave memory, so a crowd must not hold all of it."""

    async def work(world: World) -> None:
        with (
            world.prefetcher.hold(KEYS, 0, block_tokens=BLOCK, host=HERE),
            world.prefetcher.hold(KEYS, 0, block_tokens=BLOCK, host=HERE),
        ):
            await asyncio.sleep(1)
            assert world.prefetcher.held_tokens == 1600
            assert (world.prefetcher.counts.waits, world.prefetcher.counts.skipped) == (1, 1)

    run(work, max_tokens=2000)


@pytest.mark.parametrize("max_tokens", [0, 10_000])
def test_node_that_fails_and_no_prefetch_at_all_change_nothing(max_tokens: int) -> None:
    """It is help, not duty."""

    async def work(world: World) -> None:
        world.nodes[HERE].down = True
        with world.prefetcher.hold(KEYS, 0, block_tokens=BLOCK, host=HERE):
            await asyncio.sleep(1)
        assert bool(world.prefetcher.counts.failed) == bool(max_tokens)

    run(work, max_tokens=max_tokens)


def test_new_worker_is_warmed_with_what_was_wanted_lately() -> None:
    """Its first requests find their blocks on its own host."""

    async def work(world: World) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        fleet = Fleet(world.cluster, world.cluster.connect, "m", loop, lambda ref: None)
        warmer = Warmer(world.prefetcher)
        fleet.on_joined = warmer.joined
        world.cluster.add("decode", ScriptedWorker(lambda prompt, position: 7), info={"host": HERE})
        fleet.start()
        (old,) = fleet.alive("decode")
        assert warmer.warmed == 0
        warmer.wanted(old, KEYS[:50])
        warmer.wanted(old, KEYS[:20])
        world.cluster.add("decode", ScriptedWorker(lambda prompt, position: 7), info={"host": THERE})
        await asyncio.sleep(1)
        assert warmer.warmed == 1
        assert sum(count for count, _ in world.nodes[THERE].asked) == 50
        assert world.nodes[HERE].asked == []
        await asyncio.sleep(10)
        await warmer.close()
        await fleet.close()

    run(work)
