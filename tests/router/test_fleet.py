"""The fleet follows the view, and never closes a connection under a request."""

import asyncio
from contextlib import ExitStack

import pytest

from kvpool.clock import ManualClock
from kvpool.cluster import open_membership
from kvpool.policy.routing import WorkerRef
from kvpool.units import SECOND
from router.fleet import Fleet
from router.testing.cluster import ScriptedCluster
from router.testing.workers import ScriptedWorker


def _worker() -> ScriptedWorker:
    return ScriptedWorker(lambda prompt, position: 7)


def _fleet(cluster: ScriptedCluster, gone: list[WorkerRef] | None = None, clock: ManualClock | None = None) -> Fleet:
    fleet = Fleet(cluster, cluster.connect, "m", clock or ManualClock(), (gone if gone is not None else []).append)
    fleet.start()
    return fleet


async def test_fleet_holds_the_workers_of_its_model_only() -> None:
    """Another model's tokens are other tokens."""
    cluster = ScriptedCluster("m")
    ours = cluster.add("decode", _worker())
    cluster.add("decode", _worker(), info={"model": "other"})
    cluster.add("node", None)
    cluster.add("router", None)
    fleet = _fleet(cluster)
    assert [worker.ref.id for worker in fleet.alive("decode")] == [ours.id]
    assert fleet.alive("prefill") == []
    await fleet.close()


@pytest.mark.parametrize(
    "info", [{"namespace": "xyz"}, {"namespace": "ab"}, {"block_tokens": "0"}, {"block_tokens": "many"}, {"max_tokens": "0"}]
)
async def test_worker_with_unusable_info_is_ignored_with_one_complaint(info: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """One misconfigured worker must not take the router down, nor fill its log."""
    cluster = ScriptedCluster("m")
    cluster.add("decode", _worker(), info=info)
    fleet = _fleet(cluster)
    good = cluster.add("decode", _worker())
    await asyncio.sleep(0)
    assert [worker.ref.id for worker in fleet.alive("decode")] == [good.id]
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    await fleet.close()


async def test_worker_that_leaves_is_closed_once_idle() -> None:
    """A draining worker finishes what it has begun."""
    cluster, gone, port = ScriptedCluster("m"), list[WorkerRef](), _worker()
    member = cluster.add("decode", port)
    fleet = _fleet(cluster, gone)
    (worker,) = fleet.alive("decode")
    with fleet.busy(worker, 10):
        cluster.remove(member)
        await asyncio.sleep(0)
        assert fleet.alive("decode") == []
        await asyncio.sleep(0)
        closed_early = port.closed
    await fleet.close()
    assert (closed_early, port.closed) == (False, True)
    assert gone == [worker.ref]


async def test_restarted_worker_is_another_worker() -> None:
    """New incarnation, new connection, no load."""
    cluster, gone = ScriptedCluster("m"), list[WorkerRef]()
    old = cluster.add("decode", _worker(), id="a" * 32, incarnation=1)
    fleet = _fleet(cluster, gone)
    cluster.add("decode", _worker(), id="a" * 32, incarnation=2)
    await asyncio.sleep(0)
    assert [worker.ref.incarnation for worker in fleet.alive("decode")] == [2]
    assert gone == [WorkerRef("decode", old.id, 1)]
    await fleet.close()


async def test_load_is_counted_and_given_back() -> None:
    """The policy discounts by it; a leak would starve a worker for ever."""
    cluster = ScriptedCluster("m")
    cluster.add("prefill", _worker())
    fleet = _fleet(cluster)
    (worker,) = fleet.alive("prefill")
    with fleet.busy(worker, 100) as place:
        assert (worker.active, worker.backlog_tokens) == (1, 100)
        place.through()
        assert (worker.active, worker.backlog_tokens) == (1, 0)
    fails = ExitStack()
    fails.enter_context(fleet.busy(worker, 50))
    fails.__exit__(RuntimeError, RuntimeError(), None)
    assert (worker.active, worker.backlog_tokens, worker.users) == (0, 0, 0)
    await fleet.close()


async def test_suspicion_passes() -> None:
    """A worker that failed once is not banned."""
    cluster, clock = ScriptedCluster("m"), ManualClock()
    cluster.add("decode", _worker())
    fleet = _fleet(cluster, clock=clock)
    (worker,) = fleet.alive("decode")
    fleet.suspect(worker)
    assert fleet.suspected(worker)
    clock.advance(5 * SECOND)
    assert not fleet.suspected(worker)
    await fleet.close()


async def test_wait_for_change_ends_with_a_change() -> None:
    """Requests without a worker wait for exactly this."""
    cluster = ScriptedCluster("m")
    fleet = _fleet(cluster)
    waiting = asyncio.ensure_future(fleet.wait_for_change(60))
    await asyncio.sleep(0)
    cluster.add("decode", _worker())
    assert await waiting is True
    assert await fleet.wait_for_change(0.001) is False
    await fleet.close()


async def test_fleet_follows_a_real_membership_from_its_thread() -> None:
    """The membership calls back on a thread of its own; workers must still only change on the loop."""
    ports = {"127.0.0.1:7001": _worker()}
    with open_membership("memory://fleet-follows?lease_ms=1000") as membership:
        fleet = Fleet(membership, lambda address: ports[address], "m", ManualClock(), lambda ref: None)
        fleet.start()
        info = {"model": "m", "namespace": "cd" * 32, "block_tokens": "16", "max_tokens": "100"}
        registration = await asyncio.to_thread(membership.join, role="decode", address="127.0.0.1:7001", info=info)
        async with asyncio.timeout(10):
            while not fleet.alive("decode"):
                await fleet.wait_for_change(10)
            registration.close()
            while fleet.alive("decode"):
                await fleet.wait_for_change(10)
        await fleet.close()
