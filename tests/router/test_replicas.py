"""Several routers over one cluster: each knows what the others keep workers busy with, and forgets those that die."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from time import monotonic_ns
from typing import Any

import pytest

from kvpool.block import chain_keys
from kvpool.clock import MonotonicClock
from kvpool.errors import UnavailableError
from kvpool.policy.routing import WorkerRef
from kvpool.request.load import LoadReport, RouterReport, WorkerLoad
from kvpool.units import SECOND
from kvpool.wire.guard import OPEN
from router.fleet import Fleet
from router.queue.shared import SharedWork
from router.replicas.peers import LOADS_INFO, MAX_LISTENERS, Peers, Reports
from router.replicas.service import Replicas
from router.replicas.table import MAX_AGE_NS, LoadTable
from router.testing.cluster import ScriptedCluster
from router.testing.loop import VirtualLoop, run_virtual
from router.testing.workers import ScriptedWorker

A, B = ("a" * 32, 1), ("b" * 32, 1)


def _load(number: int, active: int) -> WorkerLoad:
    return WorkerLoad("decode", f"{number:032x}", 1, active, active, 10 * active, 100 * active)


def _cluster(workers: int = 2) -> ScriptedCluster:
    cluster = ScriptedCluster("m")
    for number in range(1, workers + 1):
        cluster.add("decode", ScriptedWorker(lambda prompt, position: 7), id=f"{number:032x}")
    return cluster


def _shared(clock: MonotonicClock | VirtualLoop) -> SharedWork:
    return SharedWork(clock, least_tokens=8, timeout_s=30)


def _fleet(cluster: ScriptedCluster, clock: MonotonicClock | VirtualLoop) -> Fleet:
    fleet = Fleet(cluster, cluster.connect, "m", clock, lambda ref: None)
    fleet.start()
    return fleet


def test_reports_of_all_routers_add_up_and_each_replaces_its_last() -> None:
    """A lost report can't leave a sum wrong for good."""
    table = LoadTable()
    table.heard(A, (_load(1, 5), _load(2, 1)), 0)
    table.heard(B, (_load(1, 2),), 0)
    assert {ref.id[-1]: load.active for ref, load in table.total(0).items()} == {"1": 7, "2": 1}
    table.heard(A, (_load(1, 1),), 1)
    assert {ref.id[-1]: load.active for ref, load in table.total(1).items()} == {"1": 3}
    one = table.total(1)[WorkerRef("decode", f"{1:032x}", 1)]
    assert (one.queued, one.backlog_tokens, one.decode_tokens) == (3, 30, 300)


def test_old_reports_and_lost_routers_count_no_more() -> None:
    """A router that died can't make a worker look busy for ever."""
    table = LoadTable()
    table.heard(A, (_load(1, 5),), 0)
    table.heard(B, (_load(1, 2),), MAX_AGE_NS)
    assert table.total(MAX_AGE_NS + 1) == {WorkerRef("decode", f"{1:032x}", 1): (2, 2, 20, 200)}
    table.lost(B)
    assert table.total(MAX_AGE_NS + 1) == {}


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110 - the other end tells nobody here
            await asyncio.sleep(0.02)


async def test_two_routers_see_each_others_load_over_grpc_and_forget_the_one_that_dies() -> None:
    """The real thing on loopback: a request of one counts at the other, until it ends or its router does."""
    cluster, clock = _cluster(), MonotonicClock()
    fleets = [_fleet(cluster, clock) for _ in range(2)]
    routers = [Replicas(cluster, fleet, _shared(clock), OPEN, clock) for fleet in fleets]
    for number, router in enumerate(routers):
        address = await router.start("127.0.0.1", 0, "127.0.0.1")
        cluster.add("router", None, id=f"{100 + number:032x}", info={LOADS_INFO: address})
    first, second = (fleet.alive("decode")[0] for fleet in fleets)
    with fleets[0].busy(first, 50, decode_tokens=70, sent=True):
        await _until(lambda: second.load == 1)
        assert second.elsewhere == (1, 1, 50, 70)
        assert (first.load, second.active) == (1, 0)
    await _until(lambda: second.load == 0)
    with fleets[0].busy(first, 50):
        await _until(lambda: second.load == 1)
        await routers[0].close()
        await _until(lambda: second.load == 0)
        assert routers[1].heard == 0
    await routers[1].close()
    for fleet in fleets:
        await fleet.close()


async def test_flight_of_one_router_is_followed_at_the_other_over_grpc() -> None:
    """From the leader's start to what it published; the stream carries keys' tags, not keys."""
    cluster, clock = _cluster(), MonotonicClock()
    fleets, works = [_fleet(cluster, clock) for _ in range(2)], [_shared(clock) for _ in range(2)]
    routers = [Replicas(cluster, fleet, work, OPEN, clock) for fleet, work in zip(fleets, works, strict=True)]
    for number, router in enumerate(routers):
        address = await router.start("127.0.0.1", 0, "127.0.0.1")
        cluster.add("router", None, id=f"{100 + number:032x}", info={LOADS_INFO: address})
    await _until(lambda: all(router.heard for router in routers))
    keys = chain_keys(bytes(32), range(64), 4)
    how: dict[str, Any] = {"block_tokens": 4, "priority": 0, "deadline_ns": monotonic_ns() + 30 * SECOND}
    _, led, _ = await works[0].join("a", keys, 2, **how)
    assert led is not None
    works[0].begun(led)
    await _until(lambda: bool(works[1]._abroad.find(keys, 2, priority=0, now_ns=clock.now_ns())))
    follower = asyncio.create_task(works[1].join("b", keys[:10], 2, **how))
    await _until(lambda: works[1].counts.abroad == 1)
    works[0].end(led, 9)
    assert await follower == (9, None, 1)
    for router in routers:
        await router.close()
    for fleet in fleets:
        await fleet.close()


class Scripted:
    """Another router: what it says, one report each 0.2 s, until it is told to fail or to fall silent."""

    def __init__(self, report: LoadReport) -> None:
        self.report = report
        self.fails = self.silent = False
        self.calls = 0

    async def loads(self, patience_s: float) -> AsyncGenerator[RouterReport, None]:
        """See `LoadsPort`."""
        self.calls += 1
        while True:
            if self.fails:
                raise UnavailableError("gone")
            if self.silent:
                await asyncio.sleep(patience_s)
                raise UnavailableError("silent")
            yield RouterReport(self.report)
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        """See `LoadsPort`."""


@pytest.mark.parametrize("how", ["fails", "silent"])
def test_router_that_fails_or_falls_silent_is_dropped_and_heard_again(how: str) -> None:
    """At once when its stream breaks, after a second when it only says nothing; and it is tried again while the view names it."""

    async def work(loop: VirtualLoop) -> None:
        cluster, other = _cluster(), Scripted((_load(1, 4),))
        fleet = _fleet(cluster, loop)
        peers = Peers(cluster, fleet, _shared(loop), lambda address: other, loop)
        cluster.add("router", None, info={LOADS_INFO: "x:1"})
        peers.start("me:1")
        worker = fleet.alive("decode")[0]
        await asyncio.sleep(0.5)
        assert worker.load == 4
        setattr(other, how, True)
        await asyncio.sleep(0.5 if how == "fails" else 1.5)
        assert worker.load == 0
        setattr(other, how, False)
        await asyncio.sleep(6)
        assert worker.load == 4
        await peers.close()
        await fleet.close()

    run_virtual(work)


def test_router_that_left_is_heard_no_more_and_nobody_hears_himself() -> None:
    """By the view: who isn't in it is not called."""

    async def work(loop: VirtualLoop) -> None:
        cluster, other = _cluster(), Scripted((_load(1, 4),))
        fleet = _fleet(cluster, loop)
        peers = Peers(cluster, fleet, _shared(loop), lambda address: other, loop)
        cluster.add("router", None, info={LOADS_INFO: "me:1"})
        cluster.add("router", None, info={"url": "http://older"})
        gone = cluster.add("router", None, info={LOADS_INFO: "x:1"})
        peers.start("me:1")
        await asyncio.sleep(1)
        assert other.calls == 1
        cluster.remove(gone)
        await asyncio.sleep(0.5)
        assert fleet.alive("decode")[0].load == 0
        await peers.close()
        await fleet.close()

    run_virtual(work)


def test_reports_name_only_busy_workers_and_listeners_are_bounded() -> None:
    """A cluster of a thousand idle workers costs nothing to tell of."""

    async def work(loop: VirtualLoop) -> None:
        fleet = _fleet(_cluster(3), loop)
        reports = Reports(fleet, _shared(loop))
        assert reports.report() == ()
        with fleet.busy(fleet.alive("decode")[1], 3):
            assert [(load.id[-1], load.active, load.backlog_tokens) for load in reports.report()] == [("2", 1, 3)]
        streams = [reports.loads() for _ in range(MAX_LISTENERS)]
        for stream in streams:
            await anext(stream)
        with pytest.raises(UnavailableError, match="limit"):
            await anext(reports.loads())
        for stream in streams:
            await stream.aclose()
        await anext(reports.loads())
        await fleet.close()

    run_virtual(work)


def test_load_of_others_takes_up_room() -> None:
    """Two routers with eight slots each must not send sixteen."""

    async def work(loop: VirtualLoop) -> None:
        cluster = _cluster(1)
        cluster.add("prefill", ScriptedWorker(lambda prompt, position: 7), id="9" * 32)
        fleet = _fleet(cluster, loop)
        await asyncio.sleep(0)
        assert fleet.room("prefill") == 8
        table = LoadTable()
        table.heard(A, (WorkerLoad("prefill", "9" * 32, 1, 6, 0, 0, 0),), loop.now_ns())
        fleet.shared(table.total(SECOND // 2))
        assert fleet.room("prefill") == 2
        fleet.shared({})
        assert fleet.room("prefill") == 8
        await fleet.close()

    run_virtual(work)
