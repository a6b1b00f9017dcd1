"""A node's events: what all its tiers together hold, told as it changes, over a real server."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc.aio
import pytest

from kvpool.block import BlockKey
from kvpool.client.feed import NodeFeed
from kvpool.clock import MonotonicClock
from kvpool.node.events import NodeEvents
from kvpool.node.handler import NodeHandler
from kvpool.node.tiers import Tiers
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import PoolState
from kvpool.pool.flow import FlowSettings
from kvpool.request.events import BELOW, DRAM, MAX_BATCH
from kvpool.testing.events_kit import PATIENCE_S, EventsKit, fed
from kvpool.tier import Arena
from kvpool.tier.contract import Record
from kvpool.tier.memory import unix_ms
from kvpool.units import SECOND
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.events_server import add_events

from .conftest import SIZE, Rig, chain, twin, until


class NodeWorld:
    """A node's parts with its events behind a server: `below` and `beside` are room for so many blocks."""

    def __init__(self, directory: Path, *, blocks: int = 64, below: int = 0, beside: int = 0, ring: int = 16) -> None:
        self.events = NodeEvents("0" * 32, 7, MonotonicClock(), ring=ring, watchers=2)
        self.identity = self.events.identity
        arena = Arena.create(directory, "0" * 32, 7, blocks * SIZE)
        state, clock = PoolState(arena.capacity, PrefixLru(), watch=self.events.arena_changed), MonotonicClock()
        low, fast = twin(below * SIZE) if below else None, twin(beside * SIZE, "gpu") if beside else None
        tiers = Tiers(state, arena, clock, below=low, beside=fast, settings=FlowSettings())
        handler = NodeHandler(state, arena, clock, node_id="0" * 32, incarnation=7, tiers=tiers)
        self.rig = Rig(state, arena, tiers, handler, low, fast)
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        add_events(self.server, self.events)
        self.address = ""
        self._chains = 0

    async def __aenter__(self) -> "NodeWorld":
        await self.events.start(below=self.rig.below, beside=self.rig.beside)
        self.rig.tiers.start()
        self.address = bind(self.server, "127.0.0.1:0")
        await self.server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.events.stop()
        await self.server.stop(None)
        await self.rig.tiers.stop()
        self.rig.arena.close()

    async def put(self, count: int) -> list[BlockKey]:
        self._chains += 1
        keys = chain(f"c{self._chains}", count)
        await self.rig.put(keys)
        self.settle()
        return keys

    async def drop(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self.rig.state.discard(key)
        self.settle()

    def settle(self) -> None:
        while self.events.settle():
            continue

    async def stop(self) -> None:
        await self.events.stop()

    def truth(self) -> dict[BlockKey, int]:
        """Every block that a tier holds, and the first tier that does."""
        held: dict[BlockKey, int] = {}
        for tier in (self.rig.below, self.rig.beside):
            if tier is not None:
                number = BELOW if tier is self.rig.below else 2
                entries = [entry.key for entry in tier.entries()]
                held |= {key: number for key in entries if tier.find([key], unix_ms()) != [None]}
        return held | dict.fromkeys(self.rig.state.committed_keys(), DRAM)


def tiers_of(world: NodeWorld) -> dict[BlockKey, int]:
    return {key: one[3] for key, one in world.events.events.held().items()}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[NodeWorld]:
    async with NodeWorld(tmp_path) as one:
        yield one


class TestNode(EventsKit):
    """A real node."""


async def test_block_written_down_and_evicted_moves_and_is_never_gone_meanwhile(tmp_path: Path) -> None:
    """To a router a block on the disk is still a hit: only the tier changes, with no moment without it."""
    async with NodeWorld(tmp_path, blocks=4, below=64, ring=1000) as world:
        reader = world.events.events.watch(0, 0)
        reader.next()
        first = await world.put(2)
        await until(lambda: tiers_of(world) == dict.fromkeys(first, DRAM))
        await world.put(4)
        await until(lambda: [tiers_of(world)[key] for key in first] == [BELOW] * 2)
        assert await world.rig.get(first) == [True, True]
        await until(lambda: [tiers_of(world)[key] for key in first] == [DRAM] * 2)
        while (batch := reader.next()) is not None:
            assert batch.removed == ()
        await world.rig.tiers.remove(first)
        for key in first:
            world.rig.state.discard(key)
        await until(lambda: not set(first) & tiers_of(world).keys())
        (batch,) = filter(None, [reader.next()])
        assert set(first) <= set(batch.removed)


async def test_random_work_over_three_tiers_ends_with_what_they_hold(tmp_path: Path) -> None:
    """Puts, reads, lifts into fast memory, sinks, evictions, removals, damage: the table and a consumer's feed are the truth."""
    rng = random.Random(5)
    async with NodeWorld(tmp_path, blocks=12, below=40, beside=6, ring=100_000) as world:
        feed, chains = NodeFeed(), [chain(f"r{number}", 4) for number in range(12)]
        rpc = EventsRpc(world.address)
        async with aclosing(rpc.watch(0, 0, PATIENCE_S)) as batches:
            for _ in range(120):
                some = rng.choice(chains)
                match rng.randrange(8):
                    case 0 | 1 | 2:
                        await world.rig.put(some)
                    case 3 | 4 | 5:
                        await world.rig.get(some)
                    case 6:
                        world.rig.handler.drop_damaged(rng.choice(some))
                    case _:
                        await world.rig.tiers.remove([rng.choice(some)])
            await until(lambda: tiers_of(world) == world.truth())
            assert len(world.truth()) > 12
            assert min(world.rig.tiers.counters[name] for name in ("brought", "lifted", "sunk")) > 0
            await fed(batches, feed, set(world.truth()))
            await until(lambda: tiers_of(world) == world.truth())
        await rpc.close()


async def test_record_that_runs_out_below_is_told_to_be_gone_without_being_met(tmp_path: Path) -> None:
    """A slower tier drops what is over only when it comes across it; a reader wouldn't get it any more."""
    async with NodeWorld(tmp_path, below=8) as world:
        assert world.rig.below is not None
        (short, long) = chain("short", 2)
        frame = world.rig.arena.view(0, SIZE).copy()
        records = [Record(short, None, 0, frame, unix_ms() + 200), Record(long, None, 0, frame, unix_ms() + 3_600_000)]
        assert world.rig.below.put(records, time.monotonic_ns() + 10 * SECOND) == [True, True]
        await until(lambda: set(tiers_of(world)) == {short, long})
        await until(lambda: set(tiers_of(world)) == {long})
        assert [entry.key for entry in world.rig.below.entries()] == [short, long]


async def test_slow_consumer_holds_up_nobody_and_gets_a_new_snapshot(tmp_path: Path) -> None:
    """While one consumer reads nothing, another gets every change; the slow one then starts over: what it missed was kept nowhere."""
    count, turns = 4096, 40
    async with NodeWorld(tmp_path, ring=2 * count) as world:
        events = world.events.events
        keys = set(await world.put(3))
        rpc, other, slow, quick = EventsRpc(world.address), EventsRpc(world.address), NodeFeed(), NodeFeed()
        async with aclosing(rpc.watch(0, 0, PATIENCE_S)) as lazy, aclosing(other.watch(0, 0, PATIENCE_S)) as eager:
            await fed(lazy, slow, keys)
            await fed(eager, quick, keys)
            for turn in range(turns):  # 16 MB in all: more than the connection's buffers take
                for number in range(turn // 2 * count, (turn // 2 + 1) * count):
                    key = BlockKey(number.to_bytes(32, "big"))
                    events.removed(DRAM, key) if turn % 2 else events.stored(DRAM, key, key, number)
                keys |= set(await world.put(1))
                while quick.sequence < events.sequence:
                    batch = await anext(eager)
                    assert batch.part == 0
                    quick.apply(batch)
            read = await fed(lazy, slow, keys)
        assert any(batch.part == 1 for batch in read)
        assert sum(len(batch.stored) + len(batch.removed) for batch in read) < turns * count * 3 // 4
        assert {one[0] for one in quick.blocks()} == keys
        await rpc.close()
        await other.close()


async def test_snapshot_of_many_blocks_in_bounded_parts_lets_the_loop_breathe(tmp_path: Path) -> None:
    """100,000 blocks: parts of bounded size, the loop free between them, and right although blocks come and go meanwhile."""
    async with NodeWorld(tmp_path, ring=1 << 16) as world:
        events = world.events.events
        many = [BlockKey(number.to_bytes(32, "big")) for number in range(100_000)]
        for at, key in enumerate(many):
            events.stored(DRAM, key, many[at - 1] if at else None, 16 * at)
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1
                if turns % 50 == 0:
                    events.removed(DRAM, many[turns])

        breathing = asyncio.create_task(turn())
        rpc, feed, parts = EventsRpc(world.address), NodeFeed(), 0
        async with aclosing(rpc.watch(0, 0, PATIENCE_S)) as batches:
            async for batch in batches:
                feed.apply(batch)
                parts += batch.part > 0
                assert len(batch.stored) <= MAX_BATCH
                if feed.complete:
                    breathing.cancel()
                    break
        assert parts == -(-100_000 // MAX_BATCH)
        assert turns > parts
        async with aclosing(rpc.watch(*feed.position, PATIENCE_S)) as batches:
            await fed(batches, feed, set(events.held()))
        await rpc.close()
