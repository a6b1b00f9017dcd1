"""The gate: who waits, who goes, who is sent away; in virtual time."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from kvpool.errors import UnavailableError
from kvpool.policy.admission.fairness import TokenCounters
from kvpool.units import SECOND
from router.queue.gate import DIRECT, KINDS, PREFILL, Gate, OnItsWay
from router.queue.refusal import RefusedError, after_s
from router.testing.loop import VirtualLoop, run_virtual


class World:
    """A gate before places that a test gives and takes."""

    def __init__(self, loop: VirtualLoop, *, places: int = 0, capacity: int = 100) -> None:
        self.loop = loop
        self.places = dict.fromkeys(KINDS, places)
        self.counters = TokenCounters()
        self.gate = Gate(lambda kind, on_way: self.places[kind] - on_way[kind], capacity, loop, self.counters)
        self.went: list[str] = []

    def enter(
        self,
        name: str,
        *,
        kind: str = PREFILL,
        tenant: str = "",
        priority: int = 0,
        cost: float = 1.0,
        timeout_s: float = 60.0,
        again: bool = False,
    ) -> asyncio.Task[OnItsWay]:
        """A request comes; it is noted when it goes."""

        async def go() -> OnItsWay:
            deadline_ns = self.loop.now_ns() + int(timeout_s * SECOND)
            way = await self.gate.enter(kind, tenant=tenant, priority=priority, cost=cost, deadline_ns=deadline_ns, again=again)
            self.went.append(name)
            return way

        return asyncio.ensure_future(go())

    def give(self, count: int, kind: str = PREFILL) -> None:
        """There is room for `count` more."""
        self.places[kind] += count
        self.gate.poke()


def run(work: Any, **options: Any) -> None:
    """Run `work(world)` in virtual time; afterwards nobody is in line."""

    async def whole(loop: VirtualLoop) -> None:
        world = World(loop, **options)
        await work(world)
        assert sum(world.gate.lines.values()) == 0
        await world.gate.close()

    run_virtual(whole)


def test_thousand_that_come_at_once_share_the_room_there_is() -> None:
    """Room counts as taken from the moment somebody is let through, not from when a worker hears of him."""

    async def work(world: World) -> None:
        tasks = [world.enter(str(number)) for number in range(1000)]
        await asyncio.sleep(1)
        world.gate.poke()
        assert len(world.went) == world.gate.on_their_way == 5
        world.places[PREFILL] = 0
        for task in tasks[:5]:
            (await task).arrived()
            (await task).arrived()
        await asyncio.sleep(1)
        assert (len(world.went), world.gate.on_their_way) == (5, 0)
        world.give(995)
        await asyncio.gather(*tasks)
        assert [int(name) for name in world.went] == list(range(1000))
        assert world.gate.on_their_way == 995

    run(work, places=5, capacity=2000)


def test_full_line_refuses_with_a_time_to_come_back() -> None:
    """The flood is refused, who asks little is let in, and the one that has to go for it hears of it while it waits."""

    async def work(world: World) -> None:
        flood = [world.enter(f"f{number}", tenant="flood") for number in range(5)]
        await asyncio.sleep(0.1)
        assert isinstance(flood[4].exception(), RefusedError)
        calm = world.enter("calm", tenant="calm")
        await asyncio.sleep(0.1)
        refused = flood[3].exception()
        assert isinstance(refused, RefusedError)
        assert (refused.reason, refused.retry_after_s) == ("queue_full", 1)
        world.give(10)
        await asyncio.gather(*flood[:3], calm)
        assert world.went.index("calm") <= 1

    run(work, capacity=4)


def test_deadline_that_passes_in_line_is_told_and_leaves_it() -> None:
    """Nobody waits longer than he said, and nobody takes a place who is gone."""

    async def work(world: World) -> None:
        late, patient = world.enter("late", timeout_s=2), world.enter("patient")
        with pytest.raises(UnavailableError, match="while it waited"):
            await late
        assert world.loop.time() == pytest.approx(2, abs=0.1)
        world.give(1)
        await patient
        assert world.went == ["patient"]

    run(work)


def test_caller_that_hangs_up_leaves_the_line_and_gives_its_turn_back() -> None:
    """Also in the very moment in which its turn comes."""

    async def work(world: World) -> None:
        first, second, third = (world.enter(str(number)) for number in range(3))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.wait([first])
        world.give(1)  # for the second, who hangs up before it hears of it
        second.cancel()
        await asyncio.wait([second])
        await third
        assert world.went == ["2"]

    run(work)


def test_who_needs_no_prefill_does_not_wait_for_room_at_prefill_workers() -> None:
    """Two lines: one that stands still doesn't hold up the other, and where both can go they take turns."""

    async def work(world: World) -> None:
        slow = [world.enter(f"p{number}") for number in range(3)]
        quick = [world.enter(f"d{number}", kind=DIRECT) for number in range(3)]
        await asyncio.sleep(0.1)
        world.give(3, DIRECT)
        await asyncio.gather(*quick)
        assert world.went == ["d0", "d1", "d2"]
        world.give(3)
        await asyncio.gather(*slow)

    run(work)


def test_who_comes_again_stands_in_front_is_not_refused_and_keeps_its_deadline() -> None:
    """A failed attempt costs neither the place in line nor the answer that has begun."""

    async def work(world: World) -> None:
        waiting = [world.enter(str(number)) for number in range(2)]
        again = world.enter("again", again=True)
        late = world.enter("late", again=True, timeout_s=1)
        with pytest.raises(UnavailableError, match="deadline"):
            await late
        world.give(1)
        await again
        world.give(2)
        await asyncio.gather(*waiting)
        assert world.went == ["again", "0", "1"]

    run(work, capacity=2)


def test_room_that_nobody_announces_is_found() -> None:
    """A worker's rest ends, or another router's load falls, without a word."""

    async def work(world: World) -> None:
        waiting = world.enter("a")
        await asyncio.sleep(0.1)
        world.places[PREFILL] = 1
        await asyncio.wait_for(waiting, 0.2)

    run(work)


def test_tenants_share_what_there_is_and_answers_count() -> None:
    """One sends ten times as much and has long answers; the other still gets half of the service."""

    async def work(world: World) -> None:
        tasks = [world.enter(f"flood{number}", tenant="flood", cost=100) for number in range(200)]
        tasks += [world.enter(f"calm{number}", tenant="calm", cost=100) for number in range(20)]
        await asyncio.sleep(0.1)
        for _ in range(30):
            world.give(1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            tenant = world.went[-1].rstrip("0123456789")
            world.counters.charge(tenant, 300 if tenant == "flood" else 100)
        calm = sum(name.startswith("calm") for name in world.went)
        assert calm == 20  # 400 a request of the one, 200 of the other: two to one
        world.give(1000)
        await asyncio.gather(*tasks)

    run(work, capacity=1000)


def test_less_urgent_ones_have_a_turn_while_urgent_ones_never_end() -> None:
    """Priorities order, they don't starve."""

    async def work(world: World) -> None:
        low = world.enter("low", priority=3, timeout_s=1000)
        tasks: list[Coroutine[Any, Any, Any] | asyncio.Task[OnItsWay]] = []
        for number in range(100):
            tasks.append(world.enter(f"high{number}"))
            await asyncio.sleep(0.5)
            world.give(1)
            await asyncio.sleep(0)
        world.give(100)
        await asyncio.gather(low, *tasks)
        assert 55 <= world.went.index("low") <= 65  # three steps of 10 s, one turn each 0.5 s

    run(work)


def test_time_to_come_back_is_whole_seconds_within_bounds() -> None:
    """As the header wants it."""
    assert [after_s(seconds) for seconds in (-5, 0, 0.2, 1.0, 1.2, 1e9)] == [1, 1, 1, 1, 2, 60]
