"""Nodes' blocks are in the index as long as the nodes are in the view, whatever happens to their streams."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import cast

import pytest

from kvpool.block import BlockKey, chain_keys
from kvpool.cluster import Member
from kvpool.errors import ConfigError, KvpoolError, ProtocolError, UnavailableError
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from kvpool.request.events import BELOW, BESIDE, DRAM, EventBatch, Stored
from kvpool.testing.events_twin import MemoryEvents
from kvpool.wire.channel import bind, make_server
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.events_server import add_events
from kvpool.wire.fence import NodeIdentity
from router.feeds import MemberFeeds, dial
from router.feeds.members import runs_of
from router.testing.cluster import ScriptedCluster

A, B = "a" * 32, "b" * 32
KEYS = chain_keys(b"\1" * 32, range(16 * 60), 16)
CHAIN: list[Stored] = [(key, KEYS[i - 1] if i else None, 16 * i, DRAM) for i, key in enumerate(KEYS)]

Script = list[EventBatch | KvpoolError]


def change(
    after: int, sequence: int, stored: list[Stored] | None = None, removed: list[BlockKey] | None = None, life: int = 1
) -> EventBatch:
    return EventBatch(incarnation=life, after=after, sequence=sequence, stored=tuple(stored or ()), removed=tuple(removed or ()))


def part(sequence: int, stored: list[Stored], number: int = 1, *, last: bool = True, life: int = 1) -> EventBatch:
    return EventBatch(incarnation=life, after=sequence, sequence=sequence, stored=tuple(stored), part=number, last=last)


TELLERS = pytest.mark.parametrize("role", ["node", "decode", "prefill"])
"""Nodes and workers: one stream, one way to follow it."""


class Line:
    """A member's connections: one script each, then silence."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.asked: list[tuple[int, int]] = []
        self.idle = asyncio.Event()

    async def watch(self, incarnation: int, sequence: int, patience_s: float) -> AsyncGenerator[EventBatch, None]:
        self.asked.append((incarnation, sequence))
        for one in self.scripts.pop(0) if self.scripts else []:
            if isinstance(one, KvpoolError):
                raise one
            yield one
        self.idle.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Nothing to close."""


class Rig:
    """A cluster changed by hand, followed."""

    def __init__(self, connect: Callable[[Member], EventsRpc] | None = None) -> None:
        self.cluster = ScriptedCluster("m")
        self.index: PrefixIndex[WorkerRef] = PrefixIndex()
        self.feeds = MemberFeeds(self.cluster, self.index, connect or (lambda m: cast(EventsRpc, self.cluster.connect(m.address))))

    async def node(
        self, *scripts: Script, id: str = A, incarnation: int = 1, role: str = "node", info: dict[str, str] | None = None
    ) -> Line:
        """A node, or a worker that tells, joins, and has said all that is scripted."""
        line = Line(*scripts)
        info = info or ({} if role == "node" else {"events": f"{id}/{incarnation}"})
        self.cluster.add(role, line, id=id, incarnation=incarnation, info=info)
        async with asyncio.timeout(20):
            await line.idle.wait()
        return line

    def blocks(self, id: str = A, incarnation: int = 1, role: str = "node") -> int:
        return self.index.match(KEYS).of(WorkerRef(role, id, incarnation))


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.client.feed._FIRST_PAUSE_S", 0.0)


@asynccontextmanager
async def rig(connect: Callable[[Member], EventsRpc] | None = None) -> AsyncIterator[Rig]:
    one = Rig(connect)
    one.feeds.start()
    try:
        yield one
    finally:
        await one.feeds.close()


pytestmark = pytest.mark.usefixtures("_no_pauses")


async def test_snapshot_and_changes_are_in_the_index_by_tier() -> None:
    """Each block is where it was last said to be."""
    below: list[Stored] = [(key, parent, depth, BELOW) for key, parent, depth, _ in CHAIN[20:30]]
    async with rig() as one:
        await one.node(
            [part(1, CHAIN[:20], last=False), part(1, CHAIN[20:40], 2), change(1, 3, below), change(3, 4, removed=KEYS[39:34:-1])]
        )
        assert one.index.match(KEYS).tiers(WorkerRef("node", A, 1)) == (0, 25, 10)
        assert one.feeds.complete()


async def test_snapshot_may_come_in_any_order() -> None:
    """A node's table is in no order once it has been full."""
    mixed = CHAIN[:]
    Random(5).shuffle(mixed)
    async with rig() as one:
        await one.node([part(1, mixed[:30], last=False), part(1, mixed[30:], 2)])
        assert (one.blocks(), one.index.pieces()) == (60, 1)


async def test_index_is_complete_only_with_every_node() -> None:
    """A router that has just started must still ask the pool."""
    async with rig() as one:
        assert one.feeds.complete()
        await one.node([part(1, CHAIN[:20], last=False)])
        assert not one.feeds.complete()
        await one.node([part(1, CHAIN[:20])], id=B)
        assert not one.feeds.complete()
        assert one.feeds.tells(WorkerRef("node", B, 1))
        assert one.index.match(KEYS).leading() == {WorkerRef("node", A, 1): 20, WorkerRef("node", B, 1): 20}


@TELLERS
async def test_lost_repeated_and_late_batches_change_nothing_in_the_end(role: str) -> None:
    """A gap is asked for again where the feed is; what came before is ignored."""
    async with rig() as one:
        held, gone, more = part(2, CHAIN[:20]), change(2, 5, removed=KEYS[10:20]), change(5, 6, CHAIN[10:12])
        line = await one.node([held, more], [gone, held, gone, more, gone, change(6, 6)], role=role)
        assert line.asked == [(0, 0), (1, 2)]
        assert (one.blocks(role=role), one.feeds.tells(WorkerRef(role, A, 1))) == (12, True)


@TELLERS
async def test_broken_and_unreadable_streams_are_begun_again_and_said_to_fail(role: str) -> None:
    """A batch of a version we don't know, a node that goes away for a moment: the index keeps what it had meanwhile."""
    async with rig() as one:
        newer = ProtocolError("a tier we don't know; is the node newer?")
        line = await one.node([part(2, CHAIN[:20]), newer], [UnavailableError("gone")], [UnavailableError("gone")], role=role)
        assert line.asked == [(0, 0), (1, 2), (1, 2), (1, 2)]
        assert (one.blocks(role=role), one.feeds.failures) == (20, 3)
        assert not one.feeds.tells(WorkerRef(role, A, 1))
        assert one.feeds.complete() == (role != "node")
        assert "gone" in one.feeds.failing()[WorkerRef(role, A, 1)]


async def test_stream_that_works_again_is_trusted_again() -> None:
    """A keep-alive is enough."""
    async with rig() as one:
        await one.node([part(2, CHAIN[:20]), UnavailableError("gone")], [change(2, 2)])
        assert one.feeds.complete()
        assert one.feeds.failing() == {}


async def test_stream_that_can_never_be_used_ends_alone() -> None:
    """The others go on, and the pool is asked instead."""
    async with rig() as one:
        line = Line([part(1, CHAIN[:3]), ConfigError("no such call")])
        one.cluster.add("node", line, id=A)
        await one.node([part(1, CHAIN[:20])], id=B)
        assert (len(line.asked), one.blocks(B), one.feeds.complete()) == (1, 20, False)


@TELLERS
async def test_node_that_leaves_is_forgotten_at_once(role: str) -> None:
    """Whoever is sent there finds nothing."""
    async with rig() as one:
        await one.node([part(1, CHAIN)], role=role)
        member = one.cluster.members(role)[0]
        one.cluster.remove(member)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (one.blocks(role=role), one.index.holders(), len(one.index)) == (0, (), 0)


@TELLERS
async def test_node_that_comes_back_under_its_name_begins_with_nothing(role: str) -> None:
    """The same id, the same address even: another life."""
    async with rig() as one:
        await one.node([part(9, CHAIN)], role=role)
        await one.node([part(1, CHAIN[:5], life=2)], incarnation=2, role=role)
        assert (one.blocks(role=role), one.blocks(incarnation=2, role=role)) == (0, 5)
        assert one.index.holders() == (WorkerRef(role, A, 2),)


@TELLERS
async def test_stream_of_a_later_life_empties_what_was_known(role: str) -> None:
    """The stream may know of the restart before the view does."""
    async with rig() as one:
        await one.node([part(9, CHAIN), UnavailableError("gone")], [part(2, CHAIN[:7], life=2)], role=role)
        assert (one.blocks(role=role), one.feeds.tells(WorkerRef(role, A, 1))) == (7, True)


async def test_workers_that_tell_are_followed_too() -> None:
    """A worker says in its info that it has events; one that doesn't is left alone."""
    async with rig() as one:
        on_gpu: list[Stored] = [(key, parent, depth, BESIDE) for key, parent, depth, _ in CHAIN[:8]]
        await one.node([part(1, on_gpu)], role="decode", info={"events": "1"})
        one.cluster.add("decode", Line([part(1, on_gpu)]), id=B)
        await asyncio.sleep(0)
        assert one.index.match(KEYS).leading() == {WorkerRef("decode", A, 1): 8}
        assert one.feeds.tells(WorkerRef("decode", A, 1))
        assert not one.feeds.tells(WorkerRef("decode", B, 1))


async def test_nothing_is_followed_after_the_end() -> None:
    """A view that changes while the router stops."""
    async with rig() as one:
        await one.node([part(1, CHAIN[:5])])
        await one.feeds.close()
        line = Line([part(1, CHAIN)])
        one.cluster.add("node", line, id=B)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (line.asked, one.blocks()) == ([], 5)


async def test_node_is_followed_over_the_wire_and_another_one_at_its_address_refused() -> None:
    """The real stream, and a process that was given the port of one that died."""
    twin, server = MemoryEvents(NodeIdentity(A, 7)), make_server()
    for key, parent, depth, _ in CHAIN[:30]:
        twin.events.stored(DRAM, key, parent, depth)
    twin.later = [partial(twin.events.stored, BESIDE, *CHAIN[30][:3]), partial(twin.events.removed, DRAM, KEYS[0])]
    add_events(server, twin)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    index: PrefixIndex[WorkerRef] = PrefixIndex()

    cluster = ScriptedCluster("m")
    cluster._show(tuple(Member(role="node", id=id, incarnation=3, info={"incarnation": "7"}, address=address) for id in (A, B)))
    feeds = MemberFeeds(cluster, index, dial())
    feeds.start()
    a, b = WorkerRef("node", A, 3), WorkerRef("node", B, 3)
    try:
        async with asyncio.timeout(20):
            while index.held(a) != 30 or b not in feeds.failing():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (index.match(KEYS).of(a), index.match(KEYS[1:]).of(a)) == (0, 30)
        assert (feeds.tells(a), feeds.tells(b), index.held(b)) == (True, False, 0)
    finally:
        await feeds.close()
        await server.stop(None)


async def test_worker_is_followed_over_the_wire_and_another_one_at_its_address_refused() -> None:
    """A worker that was given the port of one that died must not lend it its blocks."""
    twin, server = MemoryEvents(NodeIdentity("c" * 32, 7)), make_server()
    for key, parent, depth, _ in CHAIN[:30]:
        twin.events.stored(BESIDE, key, parent, depth)
    add_events(server, twin)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    index: PrefixIndex[WorkerRef] = PrefixIndex()
    cluster = ScriptedCluster("m")
    lives = {A: "c" * 32 + "/7", B: "d" * 32 + "/7"}
    cluster._show(tuple(Member(role="decode", id=id, incarnation=3, info={"events": life}, address=address) for id, life in lives.items()))
    feeds = MemberFeeds(cluster, index, dial())
    feeds.start()
    a, b = WorkerRef("decode", A, 3), WorkerRef("decode", B, 3)
    try:
        async with asyncio.timeout(20):
            while index.held(a) != 30 or b not in feeds.failing():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert index.match(KEYS).tiers(a) == (30, 0, 0)
        assert (feeds.tells(a), feeds.tells(b), index.held(b)) == (True, False, 0)
        assert feeds.complete()  # of the pool, which there is none of
    finally:
        await feeds.close()
        await server.stop(None)


async def test_router_that_starts_has_its_index_within_thirty_seconds() -> None:
    """All of it, beside a node and a worker with 20,000 blocks each, told in no order. `bench.router_index` says how long it takes."""
    blocks = 20_000
    keys = chain_keys(b"\2" * 32, range(blocks), 1)
    chain: list[Stored] = [(key, keys[i - 1] if i else None, i, DRAM) for i, key in enumerate(keys)]
    Random(5).shuffle(chain)
    twins = [MemoryEvents(NodeIdentity(id, 7)) for id in (A, B)]
    servers = []
    for twin in twins:
        for key, parent, depth, _ in chain:
            twin.events.stored(DRAM, key, parent, depth)
        server = make_server()
        add_events(server, twin)
        servers.append((server, bind(server, "127.0.0.1:0")))
        await server.start()
    cluster = ScriptedCluster("m")
    node = Member(role="node", id=A, incarnation=3, info={"incarnation": "7"}, address=servers[0][1])
    worker = Member(role="decode", id=B, incarnation=3, info={"events": f"{B}/7"}, address=servers[1][1])
    cluster._show((node, worker))
    index: PrefixIndex[WorkerRef] = PrefixIndex()
    feeds = MemberFeeds(cluster, index, dial())
    feeds.start()
    try:
        async with asyncio.timeout(30):
            while not (feeds.complete() and feeds.tells(WorkerRef("decode", B, 3))):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert set(index.match(keys).leading().values()) == {blocks}
    finally:
        await feeds.close()
        for server, _ in servers:
            await server.stop(None)


def test_runs_are_neighbours_of_one_chain_on_one_tier() -> None:
    """What goes into the index at once must follow each other."""
    other: list[Stored] = [(key, parent, depth, BELOW) for key, parent, depth, _ in CHAIN[3:5]]
    told = [*CHAIN[:3], *other, *CHAIN[10:12], CHAIN[0], CHAIN[2]]
    assert list(runs_of(told)) == [
        (KEYS[:3], None, DRAM),
        (KEYS[3:5], KEYS[2], BELOW),
        (KEYS[10:12], KEYS[9], DRAM),
        (KEYS[:1], None, DRAM),
        (KEYS[2:3], KEYS[1], DRAM),
    ]
    assert list(runs_of([])) == []
