"""Who gets a request when workers are sick, lie, drain, are restarted, or are all too busy; in virtual time."""

import asyncio
from dataclasses import replace

import pytest

from kvpool.policy.routing import WorkerRef
from kvpool.policy.routing.names import POLICIES
from kvpool.request import Sampling, StageTimes, TokenSources
from kvpool.request.events import DRAM
from kvpool.units import SECOND
from router.assemble import build_dispatcher
from router.job import Job
from router.need import Need
from router.queue.refusal import RefusedError
from router.settings import Limits
from router.testing.loop import VirtualLoop, run_virtual
from router.testing.workers import Fault
from tests.router.test_cold_prefix import BLOCK, PREFIX, World

LONG = Limits(direct_tokens=0, follow_tokens=0)


def _ref(world: World, role: str, number: int) -> WorkerRef:
    return next(worker.ref for worker in world.routers[0].fleet.alive(role) if worker.ref.id == f"{number:032x}")


def test_sick_worker_that_is_always_idle_attracts_nothing() -> None:
    """It fails at once, so its load is zero: a burst costs it its first few, later it gets a try after each, ever longer, rest."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        sick = world.decode[0]
        sick.faults.extend([Fault(kind="die")] * 1000)
        answers = await asyncio.gather(*(world.ask(number) for number in range(100)))
        assert all(len(answer) == 4 for answer in answers)
        burst = len(sick.calls)
        assert burst <= 8
        for number in range(100, 700):
            await world.ask(number)
            await asyncio.sleep(0.1)
        assert len(sick.calls) - burst <= 5
        sick.faults.clear()
        await asyncio.sleep(90)
        for burst in range(3):
            before = len(sick.calls)
            await asyncio.gather(*(world.ask(1000 * burst + number) for number in range(60)))
        assert len(sick.calls) - before >= 10
        await world.close()

    run_virtual(work)


def test_lone_worker_that_failed_is_tried_at_once() -> None:
    """With nobody else, a rest would only be an outage."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, prefill=0, decode=1, limits=LONG)
        world.decode[0].faults.append(Fault(kind="die"))
        began_s = loop.time()
        assert len(await world.ask(1)) == 4
        assert loop.time() - began_s < 2
        await world.close()

    run_virtual(work)


def test_worker_that_lies_loses_its_credit() -> None:
    """It is said to hold the prompt and never does: after a few requests it is chosen no more than others."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, limits=LONG)
        holdings, liar = world.routers[0].holdings, _ref(world, "prefill", 2)
        told = 0
        for number in range(30):
            prefix = tuple(range(number * 3000, number * 3000 + 1000))
            holdings.index.stored(liar, world.pool.keys(prefix), DRAM)
            before = len(world.prefill[1].calls)
            await world.ask(number, prefix=prefix)
            told += len(world.prefill[1].calls) - before
        assert holdings.index.credit(liar) < 0.1
        assert told <= 20
        await world.close()

    run_virtual(work)


@pytest.mark.parametrize("help_tokens", [0, 1400, 1600])
def test_decode_workers_help_who_would_wait_for_a_prefill_worker(help_tokens: int) -> None:
    """Of six cold prompts of 1,510 tokens one prefill worker gets the first; idle decode workers take some of the others, if they may."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, prefill=1, decode=2, limits=replace(LONG, direct_tokens=1, help_tokens=help_tokens))
        await asyncio.gather(*(world.ask(number, prefix=tuple(range(2000 * number, 2000 * number + 1500))) for number in range(6)))
        helped = sum(trace.direct for trace in world.traces)
        assert not world.traces[0].direct
        assert len(world.prefill[0].calls) == 6 - helped
        assert (2 <= helped <= 5) if help_tokens > 1510 else helped == 0
        await world.close()

    run_virtual(work)


def test_few_tokens_computed_beside_answers_teach_nothing_of_prefills() -> None:
    """A repeat that a decode worker answered late is no reason to leave the holder; what is as long as a prefill is."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, prefill=0, decode=1)
        await asyncio.sleep(0)
        router = world.routers[0]
        (worker,) = router.fleet.alive("decode")
        job = Job(request_id="r", prompt=PREFIX, max_tokens=4, stop_tokens=(), sampling=Sampling(), deadline_ns=SECOND)
        chosen, learnt = router.chooser.best("decode", Need(job), [worker], "r.d1"), router.chooser.learnt("decode")
        assert chosen is not None
        assert learnt is not None
        before, seen = learnt.estimate.compute_s(15, 1485, worker.ref), []
        for computed in (15, 16):
            sources = TokenSources(resident=len(PREFIX) - computed, computed=computed)
            router.chooser.answered(chosen, sources, StageTimes(compute_ns=SECOND))
            seen.append(learnt.estimate.compute_s(15, 1485, worker.ref))
        assert seen[0] == before
        assert seen[1] > 10 * before
        await world.close()

    run_virtual(work)


def test_restarted_worker_is_credited_with_nothing() -> None:
    """The same address and id, another life: what its former one held is gone."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, prefill=1, limits=LONG)
        await world.ask(1)
        index, old = world.routers[0].holdings.index, _ref(world, "prefill", 1)
        keys = world.pool.keys(PREFIX)
        assert index.match(keys).of(old) == len(keys)
        world.cluster.add("prefill", world.prefill[0], id=old.id, incarnation=2)
        await asyncio.sleep(0.1)
        new = _ref(world, "prefill", 1)
        assert (new.incarnation, index.match(keys).of(new), index.match(keys).of(old)) == (2, 0, 0)
        assert len(await world.ask(2)) == 4
        await world.close()

    run_virtual(work)


def test_draining_worker_gets_nothing_new_and_keeps_what_it_has() -> None:
    """Its requests end where they are; until it serves again others get the new ones."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        running = [asyncio.ensure_future(world.ask(number)) for number in range(6)]
        await asyncio.sleep(0.2)
        (member,) = [m for m in world.cluster.members("decode") if m.id == f"{11:032x}"]
        world.cluster.add("decode", world.decode[0], id=member.id, info={"state": "draining"})
        await asyncio.sleep(0)
        before = len(world.decode[0].calls)
        await asyncio.gather(*running, *(world.ask(number) for number in range(6, 40)))
        assert len(world.decode[0].calls) == before
        assert sum(trace.retries for trace in world.traces) == 0
        world.cluster.add("decode", world.decode[0], id=member.id)
        await asyncio.sleep(0)
        await asyncio.gather(*(world.ask(number) for number in range(40, 60)))
        assert len(world.decode[0].calls) > before
        await world.close()

    run_virtual(work)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_hot_prefix_on_one_worker_does_not_bring_it_everything(policy: str) -> None:
    """Whatever the policy likes: nobody gets more than 1.5 times his share of a burst."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        await world.ask(0)
        world.routers[0] = build_dispatcher(
            model="m",
            view=world.cluster,
            connect=world.cluster.connect,
            probe=world.pool,
            limits=world.limits,
            clock=loop,
            policy=policy,
            seed=1,
        )
        world.routers[0].start()
        world.routers[0].holdings.index.stored(_ref(world, "decode", 12), world.pool.keys(PREFIX), DRAM)
        before = [len(worker.calls) for worker in world.decode]
        await asyncio.gather(*(world.ask(number, session="s") for number in range(1, 121)))
        shares = [len(worker.calls) - count for worker, count in zip(world.decode, before, strict=True)]
        assert sum(shares) == 120
        assert max(shares) <= 1.5 * 120 / 3
        assert world.routers[0].chooser.policy == policy
        await world.close()

    run_virtual(work)


def test_two_routers_that_know_half_of_the_workers_each_serve_and_share_out() -> None:
    """Each spreads over the half it knows; nothing is lost, nobody is asked for what he doesn't know."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, prefill=2, decode=4)
        world.routers.append(world.router())
        await asyncio.sleep(0)  # let the whole view arrive first
        for router, mine in zip(world.routers, ({1, 11, 12}, {2, 13, 14}), strict=True):
            members = tuple(m for m in world.cluster.members() if int(m.id, 16) in mine)
            router.fleet._take(members)
        answers = await asyncio.gather(*(world.ask(number, router=number % 2) for number in range(80)))
        assert all(len(answer) == 4 for answer in answers)
        calls = [len(worker.calls) for worker in world.decode]
        assert (sum(calls[:2]), sum(calls[2:])) == (40, 40)
        assert max(calls) <= 1.5 * 20
        for router in world.routers:
            router.fleet._take(world.cluster.members())
        await world.close()

    run_virtual(work)


def test_request_that_would_miss_its_target_is_refused_before_anything_is_computed() -> None:
    """Once the speed is known: a prompt that takes longer than the target is told so at once, with a time to come back."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, limits=replace(LONG, slo_ttft_s=0.1))
        for number in range(20):
            await world.ask(number, prefix=tuple(range(number * 1000, number * 1000 + 400)))
        computed = sum(worker.computed_tokens for worker in (*world.prefill, *world.decode))
        calls = sum(len(worker.calls) for worker in (*world.prefill, *world.decode))
        with pytest.raises(RefusedError, match="first token would take") as caught:
            await world.ask(99, prefix=tuple(range(90_000, 94_000)))
        assert (caught.value.reason, caught.value.retry_after_s) == ("slo_ttft", 1)
        assert sum(worker.computed_tokens for worker in (*world.prefill, *world.decode)) == computed
        assert sum(len(worker.calls) for worker in (*world.prefill, *world.decode)) == calls
        assert world.routers[0].entrance.counts.refused == {"slo_ttft": 1}
        assert len(await world.ask(100, prefix=tuple(range(95_000, 95_400)))) == 4
        await world.close()

    run_virtual(work)


def test_request_that_decode_will_have_no_memory_for_is_refused_before_its_prefill() -> None:
    """By prediction: what is being prefilled now counts, though decode is idle yet; once that has gone there is room again."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, prefill=3, decode=0, limits=replace(LONG, slo_tpot_s=1.0))
        for number in (11, 12):
            world.decode.append(world.add("decode", number))
            (member,) = [m for m in world.cluster.members("decode") if m.id == f"{number:032x}"]
            world.cluster.add("decode", world.decode[-1], id=member.id, incarnation=2, info={"kv_tokens": "2000"})
        await asyncio.sleep(0.1)
        asks = [world.ask(number, prefix=tuple(range(number * 2000, number * 2000 + 1400))) for number in range(4)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, RefusedError)]
        assert [error.reason for error in refused] == ["slo_tpot"] * 2
        assert sum(isinstance(answer, list) for answer in answers) == 2
        assert sum(worker.computed_tokens for worker in world.prefill) < 3 * 1400
        await asyncio.sleep(1)
        assert len(await world.ask(9, prefix=tuple(range(90_000, 91_400)))) == 4
        await world.close()

    run_virtual(work)


def test_urgent_requests_go_first_through_the_whole_router() -> None:
    """`priority` reaches the line, and blocks of 16 tokens don't matter here."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, prefill=1, decode=1, limits=replace(LONG, prefill_slots=1))
        order: list[str] = []

        async def noted(name: str, number: int, priority: int) -> None:
            await world.ask(number, prefix=tuple(range(number * BLOCK * 100, number * BLOCK * 100 + 800)), priority=priority)
            order.append(name)

        await asyncio.gather(*(noted("low", number, 5) for number in range(5)), *(noted("high", number, 0) for number in range(5, 10)))
        assert order[1:6] == ["high"] * 5
        await world.close()

    run_virtual(work)
