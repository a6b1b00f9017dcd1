"""What a worker tells of its resident blocks is what its block manager has, and keeps the promises that nodes make."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from random import Random

import pytest

from kvpool.block import BlockKey, chain_keys
from kvpool.client.feed import NodeFeed
from kvpool.engine.events import WorkerEvents
from kvpool.engine.paged.blocks import BlockManager, Table
from kvpool.request.events import BESIDE
from kvpool.testing.events_kit import EventsKit
from kvpool.wire.channel import bind, make_server
from kvpool.wire.events_server import add_events

SIZE = 4
ROOT = b"\7" * 32


def filled(manager: BlockManager, keys: list[BlockKey], tokens: int) -> Table:
    """A table of `tokens` tokens whose blocks have their names."""
    table = manager.open()
    assert manager.grow(table, tokens) == []
    manager.advance(table, tokens)
    for index, key in enumerate(keys):
        count = min(SIZE, tokens - SIZE * index)
        manager.name(key, table.blocks[index], count, keys[index - 1] if index else None, SIZE * index)
    return table


class WorkerWorld:
    """A block manager that keeps nothing, with its events behind a server: what a sequence holds goes when the sequence ends."""

    def __init__(self) -> None:
        self.events = WorkerEvents(ring=16, watchers=2)
        self.identity = self.events.identity
        self.manager = BlockManager(capacity=256, block_tokens=SIZE, keep=0, listener=self.events)
        self.address = ""
        self._tables: dict[BlockKey, Table] = {}
        self._chains = 0

    async def put(self, count: int) -> list[BlockKey]:
        self._chains += 1
        keys = chain_keys(ROOT, [self._chains, *range(1, SIZE * count)], SIZE)
        self._tables[keys[0]] = filled(self.manager, keys, SIZE * count)
        return keys

    async def drop(self, keys: list[BlockKey]) -> None:
        self.manager.close(self._tables.pop(keys[0]))

    async def stop(self) -> None:
        self.events.close()


class TestWorkerEvents(EventsKit):
    """The kit's tests, on a worker."""

    @pytest.fixture
    async def world(self) -> AsyncIterator[WorkerWorld]:
        one, server = WorkerWorld(), make_server()
        add_events(server, one.events)
        one.address = bind(server, "127.0.0.1:0")
        await server.start()
        yield one
        await one.stop()
        await server.stop(None)


def held(feed: NodeFeed) -> set[BlockKey]:
    return {one[0] for one in feed.blocks()}


async def test_consumer_has_just_the_full_blocks_that_can_be_found() -> None:
    """Whatever the manager keeps, gives up, shares, or is told again; partial blocks are told to nobody."""
    rng = Random(7)
    events = WorkerEvents()
    manager = BlockManager(capacity=24, block_tokens=SIZE, keep=9, listener=events)
    feed, tables = NodeFeed(), []
    async with aclosing(events.watch(0, 0)) as batches:
        for _ in range(200):
            tokens = rng.randrange(1, 30)
            keys = chain_keys(ROOT, [rng.randrange(3), *range(1, tokens)], SIZE, tail=True)
            if manager.blocks_of(tokens) <= manager.available:
                tables.append(filled(manager, keys, tokens))
            while tables and (len(tables) > 3 or rng.random() < 0.4):
                manager.close(tables.pop(rng.randrange(len(tables))))
            while feed.sequence != events._events.sequence or not feed.complete:
                feed.apply(await anext(batches))
            assert held(feed) == {key for key, (_, count) in manager._named.items() if count == SIZE}
            assert len(events) <= manager.capacity
        manager.clear()
        for table in tables:
            manager.close(table)
        manager.clear()
        while held(feed):
            feed.apply(await anext(batches))


async def test_blocks_are_told_with_what_comes_before_them() -> None:
    """So that an index can keep a chain in one piece."""
    events = WorkerEvents()
    keys = chain_keys(ROOT, range(12), SIZE)
    filled(BlockManager(capacity=8, block_tokens=SIZE, keep=0, listener=events), keys, 12)
    async with aclosing(events.watch(0, 0)) as batches:
        batch = await anext(batches)
    assert batch.stored == ((keys[0], None, 0, BESIDE), (keys[1], keys[0], 4, BESIDE), (keys[2], keys[1], 8, BESIDE))


async def test_slow_consumer_gets_a_new_snapshot() -> None:
    """The worker remembers so many changes and no more, whoever hasn't read them."""
    world = WorkerWorld()
    feed = NodeFeed()
    async with aclosing(world.events.watch(0, 0)) as batches:
        feed.apply(await anext(batches))
        for _ in range(10):
            await world.drop(await world.put(4))
        last = await world.put(3)
        assert len(world.events._events._ring) == 16
        batch = await anext(batches)
        assert batch.part == 1
        feed.apply(batch)
        assert held(feed) == set(last)


def test_each_engine_is_another_life() -> None:
    """Routers must not take one for the other, even at the same address."""
    assert WorkerEvents().identity != WorkerEvents().identity
