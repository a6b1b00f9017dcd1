"""The contract of a node's events, as tests over a real server: subclass `EventsKit` and provide a fixture `world`."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

import pytest

from kvpool.block import BlockKey
from kvpool.client.feed import NodeFeed
from kvpool.errors import UnavailableError
from kvpool.request.events import KEEPALIVE_S, EventBatch
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.fence import NodeIdentity

PATIENCE_S = 10 * KEEPALIVE_S


class EventsWorld(Protocol):
    """A node that takes two consumers at a time and remembers 16 changes, served at an address."""

    identity: NodeIdentity
    address: str

    async def put(self, count: int) -> list[BlockKey]:
        """Store a chain of so many blocks; their keys."""
        ...

    async def drop(self, keys: list[BlockKey]) -> None:
        """Remove blocks."""
        ...

    async def stop(self) -> None:
        """The node stops telling."""
        ...


async def fed(batches: AsyncGenerator[EventBatch, None], feed: NodeFeed, keys: set[BlockKey]) -> list[EventBatch]:
    """Read until the feed has exactly these blocks; what it read."""
    read: list[EventBatch] = []
    async for batch in batches:
        read.append(batch)
        feed.apply(batch)
        if feed.complete and {one[0] for one in feed.blocks()} == keys:
            break
        assert len(read) < 1000, "the feed doesn't get there"
    return read


async def exhaust(batches: AsyncGenerator[EventBatch, None]) -> None:
    """Read until the stream fails."""
    async for _ in batches:
        continue


class EventsKit:
    """What every node promises to those that watch it."""

    async def test_consumer_gets_a_snapshot_then_changes(self, world: EventsWorld) -> None:
        """What is held first, with parents and depths, and then what comes and goes."""
        before = await world.put(3)
        rpc, feed = EventsRpc(world.address, world.identity), NodeFeed()
        async with aclosing(rpc.watch(0, 0, PATIENCE_S)) as batches:
            read = await fed(batches, feed, set(before))
            assert read[0].part == 1
            assert feed.incarnation == world.identity.incarnation
            second = feed.get(before[1])
            assert second is not None
            assert second[1] == before[0]
            after = await world.put(2)
            read = await fed(batches, feed, {*before, *after})
            await world.drop(before)
            read += await fed(batches, feed, set(after))
            assert not any(batch.part for batch in read)
        await rpc.close()

    async def test_node_with_nothing_to_tell_says_so(self, world: EventsWorld) -> None:
        """A consumer can tell a quiet node from a dead one, and whether it missed something."""
        keys = await world.put(1)
        rpc, feed = EventsRpc(world.address), NodeFeed()
        async with aclosing(rpc.watch(0, 0, PATIENCE_S)) as batches:
            await fed(batches, feed, set(keys))
            quiet = await anext(batches)
            assert (quiet.stored, quiet.removed, quiet.after, quiet.sequence) == ((), (), feed.sequence, feed.sequence)
        await rpc.close()

    async def test_consumer_that_comes_back_goes_on_where_it_was(self, world: EventsWorld) -> None:
        """No snapshot while the node remembers what the consumer missed."""
        before = await world.put(3)
        rpc, feed = EventsRpc(world.address), NodeFeed()
        async with aclosing(rpc.watch(0, 0, PATIENCE_S)) as batches:
            await fed(batches, feed, set(before))
        after = await world.put(2)
        async with aclosing(rpc.watch(*feed.position, PATIENCE_S)) as batches:
            read = await fed(batches, feed, {*before, *after})
        assert not any(batch.part for batch in read)
        await rpc.close()

    async def test_consumer_that_is_behind_or_of_another_life_gets_a_new_snapshot(self, world: EventsWorld) -> None:
        """What the node doesn't remember it can't tell, so it tells all."""
        keys = set(await world.put(3))
        rpc, feed = EventsRpc(world.address), NodeFeed()
        async with aclosing(rpc.watch(0, 0, PATIENCE_S)) as batches:
            await fed(batches, feed, keys)
        for _ in range(6):
            gone = await world.put(3)
            await world.drop(gone)
            keys |= set(await world.put(1))
        async with aclosing(rpc.watch(*feed.position, PATIENCE_S)) as batches:
            assert (await fed(batches, feed, keys))[0].part == 1
        async with aclosing(rpc.watch(feed.incarnation - 1, feed.sequence, PATIENCE_S)) as batches:
            assert (await anext(batches)).part == 1
        await rpc.close()

    async def test_one_consumer_too_many_is_refused_and_a_place_given_back(self, world: EventsWorld) -> None:
        """A node's work for watchers is bounded, and who is refused is told why."""
        rpc = EventsRpc(world.address)
        first, second = rpc.watch(0, 0, PATIENCE_S), rpc.watch(0, 0, PATIENCE_S)
        await anext(first)
        await anext(second)
        with pytest.raises(UnavailableError, match=r"2 consumers watch this \w+ already"):
            await anext(rpc.watch(0, 0, PATIENCE_S))
        await first.aclose()
        for _ in range(100):
            third = rpc.watch(0, 0, PATIENCE_S)
            try:
                assert (await anext(third)).part == 1
                break
            except UnavailableError:
                continue  # the node has not heard yet that the first has gone
        else:
            pytest.fail("the place is never given back")
        await third.aclose()
        await second.aclose()
        await rpc.close()

    async def test_watch_meant_for_another_life_is_refused(self, world: EventsWorld) -> None:
        """Whoever dials a known address must not be fed by a stranger there."""
        rpc = EventsRpc(world.address, NodeIdentity(world.identity.node_id, world.identity.incarnation + 1))
        with pytest.raises(UnavailableError, match="was meant for"):
            await anext(rpc.watch(0, 0, PATIENCE_S))
        await rpc.close()

    async def test_stream_of_a_node_that_stops_ends_with_an_error(self, world: EventsWorld) -> None:
        """The consumer knows at once, and need not wait for silence."""
        rpc = EventsRpc(world.address)
        batches = rpc.watch(0, 0, PATIENCE_S)
        await anext(batches)
        await world.stop()
        with pytest.raises(UnavailableError, match="stops"):
            await exhaust(batches)
        await rpc.close()
