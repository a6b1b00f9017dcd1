"""The hand-off: a prefill worker is told where the request will go on, whoever is chosen is counted there once, and may be replaced."""

import asyncio
from dataclasses import replace

import pytest

from kvpool.errors import ConfigError
from kvpool.request import MAX_HAND_OFF, PrefillRequest
from router.handoff import nodes_beside
from router.testing.cluster import ScriptedCluster
from router.testing.loop import VirtualLoop, run_virtual
from router.testing.workers import Fault, ScriptedWorker
from tests.router.test_dispatch import World, expected

HERE, THERE, ELSEWHERE = "host-here", "host-there", "host-elsewhere"


def _node(cluster: ScriptedCluster, number: int, host: str, state: str = "active") -> str:
    return cluster.add("node", None, id=f"{number:032x}", info={"host": host, "state": state}).id


def _world(loop: VirtualLoop, *decode: tuple[int, str]) -> tuple[World, ScriptedWorker, dict[int, ScriptedWorker], list[str]]:
    """A prefill worker here, decode workers (number, host), and a node on each host: here, there, elsewhere."""
    world = World(loop)
    prefill = world.add("prefill", number=1, info={"host": HERE})
    workers = {number: world.add("decode", number=number, info={"host": host}) for number, host in decode}
    return world, prefill, workers, [_node(world.cluster, 100 + n, host) for n, host in enumerate((HERE, THERE, ELSEWHERE))]


def _handed(prefill: ScriptedWorker) -> list[tuple[str, ...]]:
    return [call.hand_off for call in prefill.calls if isinstance(call, PrefillRequest)]


def test_nodes_beside_are_the_active_ones_of_that_host_in_order() -> None:
    """Readers there ask the first of them; one that comes, goes or can't be reached takes no near copies."""
    cluster = ScriptedCluster("m")
    third, first = _node(cluster, 3, THERE), _node(cluster, 1, THERE)
    _node(cluster, 2, HERE)
    _node(cluster, 0, THERE, "draining")
    _node(cluster, 4, THERE, "joining")
    assert nodes_beside(cluster, HERE, THERE) == (first, third)
    assert len([_node(cluster, number, THERE) for number in (5, 6)]) + 2 > MAX_HAND_OFF
    assert nodes_beside(cluster, HERE, THERE) == (first, third)
    cluster.ill.add(("node", first, 1))
    assert nodes_beside(cluster, HERE, THERE) == (third, f"{5:032x}")
    assert nodes_beside(cluster, "", THERE) == (third, f"{5:032x}")


def test_nodes_beside_are_none_where_a_push_would_be_for_nothing() -> None:
    """The same host, a host without a node, a worker that doesn't say where it is, a cluster that wants no near copies."""
    cluster = ScriptedCluster("m")
    _node(cluster, 1, THERE)
    _node(cluster, 2, "")
    assert nodes_beside(cluster, THERE, THERE) == ()
    assert nodes_beside(cluster, HERE, ELSEWHERE) == ()
    assert nodes_beside(cluster, HERE, "") == ()
    cluster.config = replace(cluster.config, near_copies=False)
    assert nodes_beside(cluster, HERE, THERE) == ()


def test_prefill_request_names_no_more_nodes_than_it_may() -> None:
    """Each costs the network a copy of the prompt."""
    PrefillRequest(request_id="p", prompt=(1,), hand_off=("a", "b"))
    with pytest.raises(ConfigError, match="at most 2"):
        PrefillRequest(request_id="p", prompt=(1,), hand_off=("a", "b", "c"))


def test_prefill_is_told_the_nodes_of_the_decode_worker_that_goes_on() -> None:
    """There is one idle decode worker: it was planned for, and it decodes."""

    async def work(loop: VirtualLoop) -> None:
        world, prefill, workers, nodes = _world(loop, (2, THERE))
        assert await world.run(world.job()) == expected(5)
        assert _handed(prefill) == [(nodes[1],)]
        assert len(workers[2].calls) == 1
        assert world.pool.asked == 1  # once a request, at its arrival: the plan waits for nobody

    run_virtual(work)


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_nothing_is_handed_off_that_stays_or_ends_here(max_tokens: int) -> None:
    """A decode worker on the prefill worker's host shares its node; an answer of one token needs no decode worker."""

    async def work(loop: VirtualLoop) -> None:
        world, prefill, _, _ = _world(loop, (2, HERE if max_tokens > 1 else THERE))
        assert await world.run(world.job(max_tokens)) == expected(max_tokens)
        assert _handed(prefill) == [()]

    run_virtual(work)


def test_planned_decode_worker_that_dies_meanwhile_is_replaced() -> None:
    """Its blocks went there in vain; the request goes on elsewhere without a failed attempt."""

    async def work(loop: VirtualLoop) -> None:
        world, prefill, workers, nodes = _world(loop, (2, THERE), (3, ELSEWHERE))
        prefill.delay_s = 1.0
        (planned,) = [member for member in world.cluster.members("decode") if member.id == f"{2:032x}"]
        loop.call_later(0.5, world.cluster.remove, planned)
        assert await world.run(world.job()) == expected(5)
        assert _handed(prefill) == [(nodes[1],)]
        assert (len(workers[2].calls), len(workers[3].calls)) == (0, 1)
        assert (world.trace.retries, world.trace.decode_worker) == (0, f"{3:032x}")
        assert workers[2].closed

    run_virtual(work)


def test_planned_decode_worker_is_kept_while_nearly_as_good_and_left_when_overloaded() -> None:
    """Two more requests there than on the best are borne for a local load, three are not."""

    async def decoded_by(loop: VirtualLoop, others: int) -> str | None:
        world, prefill, workers, _ = _world(loop, (2, THERE), (3, ELSEWHERE))
        for each in (prefill, *workers.values()):
            each.delay_s = 1.0
        task = asyncio.ensure_future(world.run(world.job()))
        await asyncio.sleep(0.5)
        planned = next(worker for worker in world.fleet.alive("decode") if worker.ref.id == f"{2:032x}")
        assert (planned.active, planned.backlog_tokens) == (1, 0)
        planned.active += others
        await asyncio.sleep(2)
        planned.active -= others
        await task
        return world.trace.decode_worker

    async def work(loop: VirtualLoop) -> None:
        assert await decoded_by(loop, 2) == f"{2:032x}"
        assert await decoded_by(loop, 3) == f"{3:032x}"

    run_virtual(work)


def test_request_is_counted_once_on_the_worker_it_is_planned_for_and_runs_on() -> None:
    """Before, while and after it decodes; so requests that are prefilled at the same time are spread."""

    async def work(loop: VirtualLoop) -> None:
        world, prefill, workers, nodes = _world(loop, (2, THERE), (3, ELSEWHERE))
        prefill.delay_s = 1.0
        await asyncio.sleep(0)
        answers = [world.dispatcher.generate(world.job(), world.trace) for _ in range(2)]
        first = [asyncio.ensure_future(anext(answer)) for answer in answers]
        await asyncio.sleep(0.5)
        assert [worker.active for worker in world.fleet.alive("decode")] == [1, 1]
        assert _handed(prefill) == [(nodes[1],), (nodes[2],)]
        await asyncio.wait(first)
        second = [asyncio.ensure_future(anext(answer)) for answer in answers]
        await asyncio.wait(second)
        assert [worker.active for worker in world.fleet.alive("decode")] == [1, 1]
        assert [worker.running for worker in workers.values()] == [1, 1]
        for answer in answers:
            await answer.aclose()
        assert [worker.active for worker in world.fleet.alive("decode")] == [0, 0]

    run_virtual(work)


def test_place_of_a_plan_is_given_back_when_the_caller_hangs_up_or_prefill_fails() -> None:
    """A place that is never given back would keep a worker idle for ever."""

    async def work(loop: VirtualLoop) -> None:
        world, prefill, workers, _ = _world(loop, (2, THERE))
        prefill.faults.extend([Fault(kind="hang"), Fault(kind="die")])
        task = asyncio.ensure_future(world.run(world.job()))
        await asyncio.sleep(1)
        assert [worker.active for worker in world.fleet.alive("decode")] == [1]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await world.run(world.job()) == expected(5)  # `run` looks at the books after each
        assert len(workers[2].calls) == 1

    run_virtual(work)


def test_retried_prefill_hands_off_to_the_same_decode_worker() -> None:
    """What the first one pushed is there already."""

    async def work(loop: VirtualLoop) -> None:
        world, prefill, _, nodes = _world(loop, (2, THERE), (3, ELSEWHERE))
        prefill.faults.append(Fault(kind="die"))
        second = world.add("prefill", number=9, info={"host": ELSEWHERE})
        assert await world.run(world.job()) == expected(5)
        assert (_handed(prefill), _handed(second)) == ([(nodes[1],)], [(nodes[1],)])

    run_virtual(work)
