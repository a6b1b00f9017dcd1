"""A cold prefix that many want at once is computed once, whatever happens to who computes it; in virtual time."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from kvpool.errors import KvpoolError, UnavailableError
from kvpool.request import Sampling, Scope
from kvpool.request.load import RouterReport
from kvpool.units import SECOND
from router.assemble import build_dispatcher
from router.dispatch import Dispatcher
from router.job import Job, Trace
from router.queue.refusal import RefusedError
from router.queue.slo import Targets
from router.replicas.peers import LOADS_INFO, Peers, Reports
from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.loop import VirtualLoop, run_virtual
from router.testing.pooled import KeyPool, PooledWorker
from router.testing.workers import Fault

BLOCK = 16
PREFIX = tuple(range(1500))
FIRST_BLOCKS = len(PREFIX) // BLOCK


class Wire:
    """One router's end of what another one tells: `delay_s` late, and nothing any more once that one is dead."""

    def __init__(self, reports: Reports, delay_s: float) -> None:
        self.reports = reports
        self.delay_s = delay_s
        self.dead = False

    async def loads(self, patience_s: float) -> AsyncGenerator[RouterReport, None]:
        """See `LoadsPort`."""
        async with aclosing(self.reports.loads()) as stream:
            async for report in stream:
                if self.dead:
                    raise UnavailableError("gone")
                await asyncio.sleep(self.delay_s)
                yield report

    async def close(self) -> None:
        """See `LoadsPort`."""


class World:
    """Prefill and decode workers over one pool, and a router or two."""

    def __init__(self, loop: VirtualLoop, *, prefill: int = 3, decode: int = 3, limits: Limits | None = None) -> None:
        self.loop = loop
        self.cluster = ScriptedCluster("m", block_tokens=BLOCK, max_tokens=8192)
        self.pool = KeyPool(block_tokens=BLOCK)
        self.limits = limits or Limits()
        self.prefill = [self.add("prefill", number) for number in range(1, prefill + 1)]
        self.decode = [self.add("decode", number) for number in range(11, 11 + decode)]
        self.routers = [self.router()]
        self.wires: list[Wire] = []
        self.peers: list[Peers] = []
        self.traces: list[Trace] = []

    def add(self, role: str, number: int) -> PooledWorker:
        """A worker joins."""
        worker = PooledWorker(self.pool)
        self.cluster.add(role, worker, id=f"{number:032x}")
        return worker

    def router(self) -> Dispatcher:
        """One more router over the same cluster."""
        dispatcher = build_dispatcher(
            model="m", view=self.cluster, connect=self.cluster.connect, probe=self.pool, limits=self.limits, clock=self.loop
        )
        dispatcher.fleet.start()
        return dispatcher

    async def together(self, count: int, *, delay_s: float = 0.002) -> None:
        """Have `count` routers that tell each other of their flights."""
        self.routers += [self.router() for _ in range(count - len(self.routers))]
        for number, router in enumerate(self.routers):
            wire = Wire(Reports(router.fleet, router.entrance.shared), delay_s)
            self.wires.append(wire)
            self.cluster.add("router", wire, id=f"{100 + number:032x}", info={LOADS_INFO: str(number)})
        for number, router in enumerate(self.routers):
            peers = Peers(self.cluster, router.fleet, router.entrance.shared, lambda address: self.wires[int(address)], self.loop)
            peers.start(str(number))
            self.peers.append(peers)
        await asyncio.sleep(0.1)

    def ask(
        self, number: int, *, router: int = 0, prefix: tuple[int, ...] = PREFIX, timeout_s: float = 120.0, **more: Any
    ) -> Coroutine[Any, Any, list[int]]:
        """The answer to the common prefix and ten tokens of the request's own."""
        trace = Trace(arrived_ns=self.loop.now_ns())
        self.traces.append(trace)
        job = Job(
            request_id=f"r{number}",
            prompt=(*prefix, *range(10_000 + 10 * number, 10_010 + 10 * number)),
            max_tokens=4,
            stop_tokens=(),
            sampling=Sampling(),
            deadline_ns=self.loop.now_ns() + int(timeout_s * SECOND),
            **more,
        )
        dispatcher = self.routers[router]

        async def tokens() -> list[int]:
            return [token async for token in dispatcher.generate(job, trace)]

        return tokens()

    async def close(self) -> None:
        """Afterwards nobody is busy, in line, or followed."""
        for peers in self.peers:
            await peers.close()
        for router in self.routers:
            await router.calls.close()
            workers = [*router.fleet.alive("prefill"), *router.fleet.alive("decode")]
            assert all((w.active, w.queued, w.backlog_tokens, w.decode_tokens, w.users) == (0, 0, 0, 0, 0) for w in workers)
            assert sum(router.entrance.gate.lines.values()) == router.entrance.gate.on_their_way == len(router.entrance.shared) == 0
            await router.close()


def times_computed(world: World) -> set[int]:
    """How often the blocks of the prefix were computed."""
    return {world.pool.computed.get(key, 0) for key in world.pool.keys(PREFIX)}


def test_200_requests_with_one_cold_prefix_compute_it_once_and_spread() -> None:
    """The numbers of the issue: once, nobody fails, no worker gets more than 1.5 times its share."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        answers = await asyncio.gather(*(world.ask(number) for number in range(200)))
        assert all(answer == [1000, 1001, 1002, 1003] for answer in answers)
        assert times_computed(world) == {1}
        shares = [len(worker.calls) for worker in world.decode]
        assert sum(shares) == 200
        assert max(shares) <= 1.5 * 200 / 3
        assert sum(len(worker.calls) for worker in world.prefill) == 1
        counts = world.routers[0].entrance.shared.counts
        assert (counts.led, counts.followed) == (1, 199)
        assert world.routers[0].entrance.counts.direct == 199
        await world.close()

    run_virtual(work)


@pytest.mark.parametrize(("tail", "follows"), [(10, True), (6000, False)])
def test_who_shares_the_beginning_of_a_long_prompt_waits_only_while_that_is_soon_computed(tail: int, follows: bool) -> None:
    """A leader with 500 tokens in common: worth a wait with ten of its own, not with 6,000 while another worker is idle."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        common = PREFIX[:500]
        leader = asyncio.ensure_future(world.ask(0, prefix=(*common, *range(20_000, 20_000 + tail))))
        await asyncio.sleep(0.01)
        began_s = loop.time()
        assert len(await world.ask(1, prefix=common)) == 4
        took_s = loop.time() - began_s
        counts = world.routers[0].entrance.shared.counts
        assert (counts.led, counts.followed) == ((1, 1) if follows else (2, 0))
        assert leader.done() is follows
        assert took_s < 0.2  # 51 ms for the prompt, 40 for the answer; the long one takes 650
        await leader
        await world.close()

    run_virtual(work)


def test_forecast_counts_what_is_being_computed_already() -> None:
    """A target of half a second, and a prompt of 600 ms: whoever comes while it is being computed is through with it, and isn't refused."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, limits=Limits(slo_ttft_s=0.5))
        prefix = tuple(range(5960))
        with pytest.raises(RefusedError, match="first token"):
            await world.ask(0, prefix=prefix)
        world.routers[0].entrance.forecast._targets = Targets(ttft_s=5.0)
        leader = asyncio.ensure_future(world.ask(1, prefix=prefix))
        await asyncio.sleep(0.2)
        world.routers[0].entrance.forecast._targets = Targets(ttft_s=0.5)
        assert len(await world.ask(2, prefix=prefix)) == 4
        await leader
        assert world.routers[0].entrance.shared.counts.followed == 1
        await world.close()

    run_virtual(work)


@pytest.mark.parametrize("kind", ["die", "hang"])
def test_leader_whose_worker_fails_computes_it_on_another(kind: str) -> None:
    """The retry is the leader's own; its followers go on waiting for it, and one computation has been enough."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, limits=Limits(stall_timeout_s=5))
        for worker in world.prefill:
            worker.faults.append(Fault(kind=kind))
            worker.answers_status = kind == "die"
        del world.prefill[2].faults[0]
        answers = await asyncio.gather(*(world.ask(number) for number in range(50)))
        assert all(len(answer) == 4 for answer in answers)
        assert times_computed(world) == {1}
        await world.close()

    run_virtual(work)


def test_leader_that_is_given_up_by_its_caller_is_followed_by_another() -> None:
    """The caller hung up: of those who waited for it one computes, the others wait for that one."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        leader = asyncio.ensure_future(world.ask(0))
        await asyncio.sleep(0.01)
        rest = [asyncio.ensure_future(world.ask(number)) for number in range(1, 40)]
        await asyncio.sleep(0.01)
        leader.cancel()
        answers = await asyncio.gather(*rest)
        assert all(len(answer) == 4 for answer in answers)
        assert times_computed(world) == {1}
        counts = world.routers[0].entrance.shared.counts
        assert (counts.led, counts.promoted, counts.overdue) == (2, 1, 0)
        await world.close()

    run_virtual(work)


def test_leader_that_fails_for_good_is_followed_by_another() -> None:
    """All its attempts are used up; the error is the leader's alone."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, prefill=1, limits=Limits(max_failures=1))
        world.prefill[0].faults.append(Fault(kind="die"))
        answers = await asyncio.gather(*(world.ask(number) for number in range(30)), return_exceptions=True)
        assert [isinstance(answer, KvpoolError) for answer in answers] == [True] + [False] * 29
        assert times_computed(world) == {1}
        await world.close()

    run_virtual(work)


def test_leader_that_takes_too_long_is_given_up_by_its_followers() -> None:
    """A worker that hangs unnoticed must not hold up everybody: one of them computes it after the time limit."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, limits=Limits(follow_timeout_s=3, stall_timeout_s=60))
        world.prefill[0].faults.append(Fault(kind="hang"))
        stuck = asyncio.ensure_future(world.ask(0))
        await asyncio.sleep(0.5)
        began_s = loop.time()
        answers = await asyncio.gather(*(world.ask(number) for number in range(1, 40)))
        assert all(len(answer) == 4 for answer in answers)
        assert loop.time() - began_s < 5
        assert times_computed(world) == {1}
        assert world.routers[0].entrance.shared.counts.overdue == 1
        stuck.cancel()
        await asyncio.wait([stuck])
        await world.close()

    run_virtual(work)


def test_followers_do_not_outwait_their_own_deadlines() -> None:
    """Who has no time to wait goes on with what there is, and fails only for lack of time."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, limits=Limits(stall_timeout_s=60))
        for worker in world.prefill:
            worker.faults.append(Fault(kind="hang"))
        stuck = asyncio.ensure_future(world.ask(0))
        await asyncio.sleep(0.5)
        with pytest.raises(KvpoolError):
            await world.ask(1, timeout_s=2)
        assert loop.time() == pytest.approx(2.5, abs=0.1)
        stuck.cancel()
        await asyncio.wait([stuck])
        await world.close()

    run_virtual(work)


def test_tenants_do_not_follow_each_other() -> None:
    """Their keys differ by their salts: nothing of one is computed for the other, or waited for."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        scopes = [Scope(salt=bytes([number]) * 32, tenant=f"t{number}") for number in (1, 2)]
        await asyncio.gather(*(world.ask(number, scope=scopes[number % 2]) for number in range(10)))
        counts = world.routers[0].entrance.shared.counts
        assert (counts.led, counts.followed) == (2, 8)
        await world.close()

    run_virtual(work)


def test_prefixes_that_differ_wait_for_nobody() -> None:
    """Different prompts side by side: each leads, none follows."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        prefixes = [tuple(range(n * 2000, n * 2000 + 600)) for n in range(1, 7)]
        await asyncio.gather(*(world.ask(n, prefix=prefix) for n, prefix in enumerate(prefixes)))
        counts = world.routers[0].entrance.shared.counts
        assert (counts.led, counts.followed) == (6, 0)
        assert min(len(worker.calls) for worker in world.prefill) >= 1
        await world.close()

    run_virtual(work)


def test_two_routers_that_know_nothing_of_each_other_compute_it_twice_at_most() -> None:
    """While they can't hear each other; that is the stated bound."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        world.routers.append(world.router())
        await asyncio.gather(*(world.ask(number, router=number % 2) for number in range(100)))
        assert max(times_computed(world)) <= 2
        assert max(len(worker.calls) for worker in world.decode) <= 1.5 * 100 / 3
        await world.close()

    run_virtual(work)


@pytest.mark.parametrize("apart_s", [0.0, 0.001, 0.05])
def test_routers_that_hear_each_other_compute_it_once(apart_s: float) -> None:
    """Whether its requests come at once, in the moment that news takes, or while it is being computed."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        await world.together(3)

        async def ask(number: int) -> list[int]:
            await asyncio.sleep(apart_s * (number % 3))
            return await world.ask(number, router=number % 3)

        answers = await asyncio.gather(*(ask(number) for number in range(90)))
        assert all(len(answer) == 4 for answer in answers)
        assert times_computed(world) == {1}
        assert sum(len(worker.calls) for worker in world.prefill) == 1
        assert sum(router.entrance.shared.counts.abroad for router in world.routers) >= 2
        await world.close()

    run_virtual(work)


def test_flights_of_a_router_that_dies_end_and_another_one_computes_it() -> None:
    """Its requests are lost with it, those of the others aren't."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        for worker in world.prefill:
            worker.faults.append(Fault(kind="hang"))
        await world.together(2)
        lost = asyncio.ensure_future(world.ask(0, router=0))
        await asyncio.sleep(0.5)
        rest = [asyncio.ensure_future(world.ask(number, router=1)) for number in range(1, 20)]
        await asyncio.sleep(1)
        assert len(world.routers[1].entrance.shared) == 0
        for worker in world.prefill:
            worker.faults.clear()
        began_s = loop.time()
        world.wires[0].dead = True
        answers = await asyncio.gather(*rest)
        assert all(len(answer) == 4 for answer in answers)
        assert times_computed(world) == {1}
        assert loop.time() - began_s < 2
        lost.cancel()
        await asyncio.wait([lost])
        await world.close()

    run_virtual(work)


def test_news_that_is_late_costs_a_second_computation_and_no_more() -> None:
    """Nobody waits for certainty."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        await world.together(2, delay_s=0.3)
        answers = await asyncio.gather(*(world.ask(number, router=number % 2) for number in range(40)))
        assert all(len(answer) == 4 for answer in answers)
        assert max(times_computed(world)) <= 2
        await world.close()

    run_virtual(work)


def test_leader_elsewhere_that_takes_too_long_is_given_up() -> None:
    """The same limit as for one's own."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, limits=Limits(follow_timeout_s=3, stall_timeout_s=60))
        for worker in world.prefill:
            worker.faults.append(Fault(kind="hang"))
        await world.together(2)
        stuck = asyncio.ensure_future(world.ask(0, router=0))
        await asyncio.sleep(0.5)
        for worker in world.prefill:
            worker.faults.clear()
        began_s = loop.time()
        answers = await asyncio.gather(*(world.ask(number, router=1) for number in range(1, 20)))
        assert all(len(answer) == 4 for answer in answers)
        assert 2 < loop.time() - began_s < 6
        assert times_computed(world) == {1}
        stuck.cancel()
        await asyncio.wait([stuck])
        await world.close()

    run_virtual(work)
