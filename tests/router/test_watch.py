"""Silence is judged, not counted: dead is found out, slow is left alone."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from kvpool.errors import DeadlineError, UnavailableError
from kvpool.units import SECOND
from router.testing.loop import VirtualLoop, run_virtual
from router.watch import Watch

FOREVER = -1.0


class _World:
    """One stream whose events come after given silences, and a worker that answers or not."""

    def __init__(self, loop: VirtualLoop, silences: Sequence[float], *, deadline_s: float = 1000) -> None:
        self.loop = loop
        self.silences = silences
        self.present = True
        self.load: int | None = 1
        self.asked_at: list[float] = []
        self.closed = False
        self.watch = Watch(
            name="worker",
            clock=loop,
            stall_timeout_s=20,
            deadline_ns=int(deadline_s * SECOND),
            present=lambda: self.present,
            load=self._answer,
        )

    async def seen(self) -> list[int]:
        """Watch the stream to its end."""
        return [event async for event in self.watch.events(self._stream())]

    async def _answer(self) -> int | None:
        self.asked_at.append(self.loop.time())
        return self.load

    async def _stream(self) -> AsyncGenerator[int, None]:
        try:
            for number, silence in enumerate(self.silences):
                await (asyncio.Event().wait() if silence == FOREVER else asyncio.sleep(silence))
                yield number
        finally:
            self.closed = True


def test_stream_that_keeps_talking_is_never_questioned() -> None:
    """The common case costs nothing."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [19.0] * 5)
        assert await world.seen() == [0, 1, 2, 3, 4]
        assert world.asked_at == []

    run_virtual(work)


def test_slow_start_of_a_worker_that_answers_is_waited_for() -> None:
    """A long prompt behind a queue takes minutes and is no failure."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [200.0])
        assert await world.seen() == [0]
        assert len(world.asked_at) == 9

    run_virtual(work)


def test_silent_worker_that_does_not_answer_is_given_up() -> None:
    """A stopped process keeps its connection open for ever."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [1.0, FOREVER])
        world.load = None
        with pytest.raises(UnavailableError, match="does not answer"):
            await world.seen()
        assert loop.time() == pytest.approx(21.0)
        assert world.closed

    run_virtual(work)


def test_silent_worker_that_left_the_view_is_questioned_at_once() -> None:
    """Membership notices a stopped process in seconds; no need to sit out the stall time."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [FOREVER])
        world.load = None
        loop.call_later(3.0, setattr, world, "present", False)
        with pytest.raises(UnavailableError, match="does not answer"):
            await world.seen()
        assert loop.time() < 5.0

    run_virtual(work)


def test_worker_that_left_but_still_streams_is_left_to_finish() -> None:
    """A draining worker leaves the view before it is done."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [5.0, 5.0])
        world.present = False
        assert await world.seen() == [0, 1]

    run_virtual(work)


def test_worker_that_knows_nothing_of_the_request_is_given_up() -> None:
    """It lost the call without ending it; its own word says so, after one period of silence."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [FOREVER])
        world.load = 0
        with pytest.raises(UnavailableError, match="lost the request"):
            await world.seen()
        assert loop.time() == pytest.approx(20.0)

    run_virtual(work)


def test_stream_that_stops_midway_is_given_up_though_the_worker_answers() -> None:
    """A wedged engine behind a live server must not hold a request until its deadline."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [1.0, FOREVER])
        with pytest.raises(UnavailableError, match="stream has stopped"):
            await world.seen()
        assert loop.time() == pytest.approx(61.0)

    run_virtual(work)


def test_deadline_ends_the_wait() -> None:
    """Every wait has a deadline."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [FOREVER], deadline_s=30)
        with pytest.raises(DeadlineError):
            await world.seen()
        assert loop.time() == pytest.approx(30.0)
        assert world.closed

    run_virtual(work)


def test_call_cancelled_by_nobody_we_know_is_a_failure_not_our_cancellation() -> None:
    """gRPC reports a connection closed under a call as a cancellation; taken for our own it would end the request without an answer."""

    async def work(loop: VirtualLoop) -> None:
        async def stream() -> AsyncGenerator[int, None]:
            yield 1
            raise asyncio.CancelledError

        seen = []
        events = _World(loop, []).watch.events(stream())
        seen.append(await anext(events))
        with pytest.raises(UnavailableError, match="cancelled under us"):
            await anext(events)
        assert seen == [1]

    run_virtual(work)


def test_closing_the_watch_closes_the_stream() -> None:
    """Closing is how a call is cancelled."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [1.0, 1.0, FOREVER])
        events = world.watch.events(world._stream())
        assert await anext(events) == 0
        await events.aclose()
        assert world.closed

    run_virtual(work)


def test_cancelling_the_watch_closes_the_stream_before_it_returns() -> None:
    """After a hang-up nothing may still be running."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [FOREVER])
        task = asyncio.ensure_future(world.seen())
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.closed

    run_virtual(work)


def test_giving_up_leaves_no_cancellation_behind() -> None:
    """The request goes on with another worker, in the same task."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [1.0, FOREVER])
        world.load = None
        with pytest.raises(UnavailableError, match="does not answer"):
            await world.seen()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(1)

    run_virtual(work)


def test_request_that_is_cancelled_as_its_worker_is_given_up_is_cancelled() -> None:
    """The caller's hang-up wins: nobody wants another worker."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [FOREVER], deadline_s=30)
        task = asyncio.ensure_future(world.seen())
        loop.call_at(30.0, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.closed

    run_virtual(work)


def test_events_that_come_while_the_worker_is_asked_clear_it() -> None:
    """It was slow to say that it lives, and said it by working."""

    async def work(loop: VirtualLoop) -> None:
        world = _World(loop, [21.0, 1.0, 1.0])

        async def slow() -> int | None:
            await asyncio.sleep(3)
            return None

        world.watch._load = slow
        assert await world.seen() == [0, 1, 2]

    run_virtual(work)


def test_error_of_the_call_is_told_as_it_was() -> None:
    """With its cause: the log is read by somebody."""

    async def work(loop: VirtualLoop) -> None:
        async def stream() -> AsyncGenerator[int, None]:
            yield 1
            raise UnavailableError("gone") from OSError("reset")

        events = _World(loop, []).watch.events(stream())
        await anext(events)
        with pytest.raises(UnavailableError, match="gone") as failed:
            await anext(events)
        assert isinstance(failed.value.__cause__, OSError)

    run_virtual(work)
