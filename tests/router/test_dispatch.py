"""One request's way through workers that come, die, hang and return; in virtual time."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from kvpool.errors import ConfigError, DeadlineError, UnavailableError
from kvpool.request import DecodeRequest, FinishReason, PrefillRequest, Sampling
from kvpool.units import SECOND
from router.assemble import build_dispatcher
from router.job import Job, Trace
from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.loop import VirtualLoop, run_virtual
from router.testing.pool import ScriptedPool
from router.testing.workers import Fault, ScriptedWorker

PLAIN = Limits(direct_tokens=0, follow_tokens=0)
"""Every prompt takes the long way, alone."""
PROMPT = tuple(range(10, 30))
STOP = 99


def answer(prompt: tuple[int, ...], position: int) -> int:
    """A different token at every position."""
    return 1000 + position


class World:
    """A dispatcher over a scripted cluster."""

    def __init__(self, loop: VirtualLoop, limits: Limits | None = None) -> None:
        self.loop = loop
        self.cluster = ScriptedCluster("m")
        self.pool = ScriptedPool()
        self.dispatcher = build_dispatcher(
            model="m", view=self.cluster, connect=self.cluster.connect, probe=self.pool, limits=limits or PLAIN, clock=loop
        )
        self.fleet = self.dispatcher.fleet
        self.trace = Trace(arrived_ns=0)
        self.fleet.start()

    def add(
        self, role: str, *faults: Fault, number: int = 1, incarnation: int = 1, info: dict[str, str] | None = None, **options: Any
    ) -> ScriptedWorker:
        """A worker that answers by `answer` unless told otherwise, with a readable id."""
        worker = ScriptedWorker(**{"answer": answer, **options})
        worker.faults.extend(faults)
        self.cluster.add(role, worker, id=f"{number:032x}", incarnation=incarnation, info=info)
        return worker

    def job(self, max_tokens: int = 5, *, timeout_s: float = 120, prompt: tuple[int, ...] = PROMPT) -> Job:
        """A request made now."""
        return Job(
            request_id="r",
            prompt=prompt,
            max_tokens=max_tokens,
            stop_tokens=(STOP,),
            sampling=Sampling(),
            deadline_ns=self.loop.now_ns() + int(timeout_s * SECOND),
        )

    def tokens(self, job: Job) -> AsyncGenerator[int, None]:
        """The answer, into a fresh trace."""
        self.trace = Trace(arrived_ns=self.loop.now_ns())
        return self.dispatcher.generate(job, self.trace)

    async def run(self, job: Job) -> list[int]:
        """The whole answer; afterwards no worker may be left busy."""
        await asyncio.sleep(0)  # let the view arrive
        try:
            return [token async for token in self.tokens(job)]
        finally:
            await self.dispatcher.calls.close()
            workers = [*self.fleet.alive("prefill"), *self.fleet.alive("decode")]
            assert all((w.active, w.backlog_tokens, w.users) == (0, 0, 0) for w in workers)


def expected(count: int) -> list[int]:
    """The first `count` tokens of every answer."""
    return [1000 + position for position in range(count)]


def test_request_goes_through_prefill_then_decode() -> None:
    """The plain way: the decode worker is handed the first token and gives the rest."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        prefill, decode = world.add("prefill", cached=12), world.add("decode", cached=20)
        assert await world.run(world.job()) == expected(5)
        (first,), (rest,) = prefill.calls, decode.calls
        assert isinstance(first, PrefillRequest)
        assert isinstance(rest, DecodeRequest)
        assert (first.prompt, rest.generated, rest.max_tokens, rest.stop_tokens) == (PROMPT, (1000,), 5, (STOP,))
        assert world.trace.reason is FinishReason.LENGTH
        assert (world.trace.cached_tokens, world.trace.retries, world.trace.fallbacks) == (12, 0, [])
        assert world.trace.decode_sources is not None
        assert world.trace.decode_sources.pool == 20
        assert (prefill.cancelled, decode.cancelled) == (0, 0)

    run_virtual(work)


def test_answer_ends_with_its_stop_token() -> None:
    """The stop token is generated, counted, and the last."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        for role in ("prefill", "decode"):
            world.add(role, answer=lambda prompt, position: STOP if position == 2 else position)
        assert await world.run(world.job(50)) == [0, 1, STOP]
        assert world.trace.reason is FinishReason.STOP

    run_virtual(work)


@pytest.mark.parametrize(("max_tokens", "first", "reason"), [(1, 5, FinishReason.LENGTH), (9, STOP, FinishReason.STOP)])
def test_answer_of_one_token_needs_no_decode_worker(max_tokens: int, first: int, reason: FinishReason) -> None:
    """And the prefill worker is still let to publish: cancelling it would throw away the prompt's blocks."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        prefill = world.add("prefill", answer=lambda prompt, position: first)
        assert await world.run(world.job(max_tokens)) == [first]
        assert world.trace.reason is reason
        assert prefill.cancelled == 0

    run_virtual(work)


def test_without_prefill_worker_the_decode_worker_does_it_all() -> None:
    """A cluster without prefill workers serves, only slower."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        decode = world.add("decode", cached=8)
        assert await world.run(world.job()) == expected(5)
        (request,) = decode.calls
        assert isinstance(request, DecodeRequest)
        assert request.generated == ()
        assert world.trace.fallbacks == ["no_prefill_worker"]
        assert world.trace.prefill_worker is None
        assert world.trace.cached_tokens == 8

    run_virtual(work)


def test_prefill_death_before_the_first_token_is_retried_on_another() -> None:
    """Nothing was shown yet, so nothing shows."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        dying, other = world.add("prefill", Fault(kind="die"), number=1), world.add("prefill", number=2)
        world.add("decode", number=3)
        assert await world.run(world.job()) == expected(5)
        assert (len(dying.calls), len(other.calls)) == (1, 1)
        assert (world.trace.retries, world.trace.fallbacks) == (1, [])
        assert world.trace.prefill_worker == f"{2:032x}"

    run_virtual(work)


@pytest.mark.parametrize("kind", ["die", "end"])
def test_prefill_without_a_peer_fails_over_to_the_decode_worker(kind: str) -> None:
    """The only prefill worker is gone: computing on the decode worker beats waiting."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        world.add("prefill", Fault(kind=kind))
        world.add("decode", number=2)
        assert await world.run(world.job()) == expected(5)
        assert world.trace.fallbacks == ["prefill_failed"]
        assert world.trace.retries == 1

    run_virtual(work)


@pytest.mark.parametrize(("kind", "reason"), [("die", "publish_lost"), ("hang", "publish_timeout"), ("end", "published_partly")])
def test_prefill_lost_after_the_first_token_costs_only_its_blocks(kind: str, reason: str) -> None:
    """The token is out; the decode worker computes what the pool lacks, and no other prefill is tried."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        world.add("prefill", Fault(kind=kind, after=1))
        decode = world.add("decode", number=2)
        assert await world.run(world.job()) == expected(5)
        assert world.trace.fallbacks == [reason]
        assert world.trace.retries == 0
        assert len(decode.calls) == 1
        assert loop.time() <= 12.5

    run_virtual(work)


@pytest.mark.parametrize("after", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["die", "end", "hang"])
def test_decode_failure_after_k_events_continues_seamlessly_on_another(kind: str, after: int) -> None:
    """The next worker gets prompt and tokens so far, and the caller sees one unbroken answer."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        world.add("prefill")
        first = world.add("decode", Fault(kind=kind, after=after), number=2)
        first.answers_status = False
        second = world.add("decode", number=3)
        assert await world.run(world.job(8)) == expected(8)
        (request,) = second.calls
        assert isinstance(request, DecodeRequest)
        assert list(request.generated) == expected(max(1, after))
        assert world.trace.retries == 1
        assert world.trace.decode_worker == f"{3:032x}"
        assert loop.time() < 30
        ids = {call.request_id for call in [*first.calls, *second.calls]}
        assert len(ids) == 2

    run_virtual(work)


@pytest.mark.parametrize("kind", ["die", "end"])
def test_decode_failure_after_the_last_token_changes_nothing(kind: str) -> None:
    """Everything asked for is there; asking again could only break it."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        world.add("prefill")
        decode = world.add("decode", Fault(kind=kind, after=5), number=2)
        assert await world.run(world.job(5)) == expected(5)
        assert world.trace.reason is FinishReason.LENGTH
        assert (len(decode.calls), world.trace.retries) == (1, 0)

    run_virtual(work)


def test_all_workers_dead_then_one_returns_the_request_goes_on() -> None:
    """A restart within the deadline costs waiting, not the request."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        world.add("prefill")
        world.add("decode", Fault(kind="die", after=3), number=2).answers_status = False
        returned = ScriptedWorker(answer)
        loop.call_later(40, lambda: world.cluster.add("decode", returned, id=f"{2:032x}", incarnation=2))
        assert await world.run(world.job(8)) == expected(8)
        (request,) = returned.calls
        assert isinstance(request, DecodeRequest)
        assert list(request.generated) == expected(3)
        assert "waited_for_decode_worker" in world.trace.fallbacks
        assert 40 <= loop.time() < 46

    run_virtual(work)


def test_worker_that_answers_again_is_taken_back() -> None:
    """The same incarnation, only cut off or stopped for a while; with nobody else it gets another chance."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        decode = world.add("decode", Fault(kind="die", after=2))
        decode.answers_status = False
        loop.call_later(30, setattr, decode, "answers_status", True)
        assert await world.run(world.job(8)) == expected(8)
        assert len(decode.calls) == 2
        assert 30 <= loop.time() < 45

    run_virtual(work)


def test_failed_attempt_waits_in_line_while_the_others_are_full() -> None:
    """A worker's death must not push its requests onto workers without room; they go first when there is some."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, replace(PLAIN, direct_tokens=64, decode_slots=1))
        world.add("decode", Fault(kind="die", after=3), number=1, delay_s=1)
        busy = world.add("decode", number=2, delay_s=1)
        await asyncio.sleep(0)
        jobs = [replace(world.job(5), request_id=f"r{number}") for number in range(4)]
        traces = [Trace(arrived_ns=0) for _ in jobs]

        async def ask(number: int) -> list[int]:
            return [token async for token in world.dispatcher.generate(jobs[number], traces[number])]

        assert await asyncio.gather(*(ask(number) for number in range(4))) == [expected(5)] * 4
        failed = next(trace for trace in traces if trace.retries)
        assert failed.retries == 1
        assert [len(call.generated) for call in busy.calls if isinstance(call, DecodeRequest)][:2] == [0, 2]
        assert failed.queued_ns > 2 * SECOND
        assert world.dispatcher.entrance.gate.on_their_way == 0
        await world.dispatcher.calls.close()

    run_virtual(work)


def test_failed_prefill_does_not_wait_for_the_room_that_it_has_taken_itself() -> None:
    """It was planned for the one place there is to decode."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, replace(PLAIN, decode_slots=1))
        world.add("prefill", Fault(kind="die"), number=1)
        world.add("prefill", number=2)
        world.add("decode", number=3)
        assert await world.run(world.job(5)) == expected(5)
        assert world.trace.retries <= 1
        assert loop.time() < 1

    run_virtual(work)


def test_deadline_without_any_worker_is_a_clear_error() -> None:
    """Nobody came: the caller is told so, on time."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        with pytest.raises(UnavailableError, match="no decode worker"):
            await world.run(world.job(timeout_s=30))
        assert loop.time() == pytest.approx(30, abs=0.1)

    run_virtual(work)


def test_deadline_during_work_is_a_clear_error() -> None:
    """A worker that is alive but too slow doesn't hold the caller past the deadline."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        decode = world.add("decode", delay_s=10)
        with pytest.raises(DeadlineError, match="deadline"):
            await world.run(world.job(50, timeout_s=45))
        assert loop.time() == pytest.approx(45, abs=0.1)
        assert (decode.running, decode.cancelled) == (0, 1)

    run_virtual(work)


def test_request_that_kills_every_worker_is_given_up() -> None:
    """A poisonous request must not be carried to worker after worker without end."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop, replace(PLAIN, max_failures=3))
        workers = [world.add("decode", Fault(kind="die"), number=number) for number in range(2, 9)]
        with pytest.raises(UnavailableError, match="given up after 3 failed attempts"):
            await world.run(world.job())
        assert sum(len(worker.calls) for worker in workers) == 3

    run_virtual(work)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_refused_request_is_the_callers_fault_and_not_retried(role: str) -> None:
    """Another worker would refuse it too."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        for name, number in (("prefill", 1), ("prefill", 2), ("decode", 3), ("decode", 4)):
            world.add(name, *([Fault(kind="refuse")] if name == role else []), number=number)
        with pytest.raises(ConfigError, match="does not like"):
            await world.run(world.job())
        assert world.trace.retries == 0

    run_virtual(work)


def test_closing_the_answer_cancels_the_worker_before_it_returns() -> None:
    """A caller that hangs up must stop the work at once."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        world.add("prefill")
        decode = world.add("decode", number=2)
        await asyncio.sleep(0)
        tokens = world.tokens(world.job(1000))
        seen = [await anext(tokens) for _ in range(5)]
        await tokens.aclose()
        assert seen == expected(5)
        assert (decode.running, decode.cancelled) == (0, 1)
        assert all((w.active, w.users) == (0, 0) for w in world.fleet.alive("decode"))

    run_virtual(work)


def test_closing_during_prefill_cancels_the_prefill() -> None:
    """Also when nothing has been said yet."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        prefill = world.add("prefill", Fault(kind="hang"))
        task = asyncio.ensure_future(world.run(world.job()))
        await asyncio.sleep(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (prefill.running, prefill.cancelled) == (0, 1)

    run_virtual(work)


def test_second_turn_goes_to_the_workers_that_hold_the_first() -> None:
    """Where a conversation was served is where its next turn is cheapest."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        for number in (1, 2, 3):
            world.add("prefill", number=number)
            world.add("decode", number=number + 10)
        prompt = tuple(range(200))
        first = world.job(6, prompt=prompt)
        await asyncio.sleep(0)
        for number in (1, 11):
            world.fleet.suspect(next(w for role in ("prefill", "decode") for w in world.fleet.alive(role) if int(w.ref.id, 16) == number))
        answered = await world.run(first)
        served = world.trace.prefill_worker, world.trace.decode_worker
        assert served == (f"{2:032x}", f"{12:032x}")
        await asyncio.sleep(10)
        await world.run(world.job(6, prompt=(*prompt, *answered, *range(30))))
        assert (world.trace.prefill_worker, world.trace.decode_worker) == served

    run_virtual(work)


def test_pool_is_asked_once_per_request_and_left_alone_in_trouble() -> None:
    """Whatever is chosen of it, one answer does; a pool that doesn't answer costs its time limit once, not every request."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        world.add("prefill", number=1)
        world.add("prefill", number=2)
        world.add("decode", number=11)
        await world.run(world.job())
        assert world.pool.asked == 1
        world.pool.down = True
        await world.run(world.job())
        await world.run(world.job())
        assert world.pool.asked == 2
        await asyncio.sleep(6)
        await world.run(world.job())
        assert world.pool.asked == 3

    run_virtual(work)


def test_prompt_shorter_than_a_block_is_served() -> None:
    """It has no full block and no key."""

    async def work(loop: VirtualLoop) -> None:
        world = World(loop)
        for number in (1, 2):
            world.add("prefill", number=number)
        world.add("decode", number=11)
        assert await world.run(world.job(3, prompt=(7,))) == expected(3)

    run_virtual(work)
