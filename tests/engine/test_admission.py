"""Who may enter: counts, bytes, order, and nothing lost to a cancellation."""

import asyncio

import pytest

from kvpool.engine.admission import Admission, OverloadedError
from kvpool.errors import ConfigError, UnavailableError


def _books(admission: Admission) -> tuple[int, int, int]:
    return admission.active, admission.bytes, admission.queued


async def _turn() -> None:
    """Let the others run."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_enter_waits_in_order_for_count_and_bytes() -> None:
    """First come, first served: a small request behind a large one doesn't overtake it."""
    admission = Admission(max_active=2, max_queued=5, max_bytes=100)
    entered: list[str] = []

    async def enter(name: str, cost: int) -> None:
        await admission.enter(cost)
        entered.append(name)

    await enter("a", 80)
    tasks = [asyncio.create_task(enter("big", 90)), asyncio.create_task(enter("small", 10)), asyncio.create_task(enter("third", 10))]
    await _turn()
    assert entered == ["a"]
    assert _books(admission) == (1, 80, 3)
    admission.leave(80)
    await _turn()
    assert entered == ["a", "big", "small"]
    admission.leave(90)
    await _turn()
    assert entered == ["a", "big", "small", "third"]
    await asyncio.gather(*tasks)
    assert _books(admission) == (2, 20, 0)


async def test_enter_beyond_the_queue_is_refused_as_unavailable() -> None:
    """The refusal is the kind of error on which a router tries another worker."""
    admission = Admission(max_active=1, max_queued=0, max_bytes=10)
    await admission.enter(1)
    with pytest.raises(OverloadedError, match="try again later"):
        await admission.enter(1)
    assert issubclass(OverloadedError, UnavailableError)


async def test_enter_of_what_can_never_fit_is_refused_with_advice() -> None:
    """Waiting would be for ever."""
    with pytest.raises(ConfigError, match="--kv-memory"):
        await Admission(max_active=1, max_queued=9, max_bytes=10).enter(11)


async def test_enter_cancelled_in_the_queue_leaves_no_trace_and_lets_the_next_in() -> None:
    """The head of the queue gives up: the next one that fits enters."""
    admission = Admission(max_active=9, max_queued=9, max_bytes=10)
    await admission.enter(5)
    big, small = asyncio.create_task(admission.enter(10)), asyncio.create_task(admission.enter(5))
    await _turn()
    assert _books(admission) == (1, 5, 2)
    big.cancel()
    with pytest.raises(asyncio.CancelledError):
        await big
    await small
    assert _books(admission) == (2, 10, 0)


async def test_enter_cancelled_in_the_moment_of_admission_gives_the_place_back() -> None:
    """A place granted to somebody who was cancelled before running goes to the next."""
    admission = Admission(max_active=1, max_queued=9, max_bytes=10)
    await admission.enter(5)
    first, second = asyncio.create_task(admission.enter(5)), asyncio.create_task(admission.enter(5))
    await _turn()
    admission.leave(5)  # grants first's place
    first.cancel()  # before it could run
    with pytest.raises(asyncio.CancelledError):
        await first
    await second
    assert _books(admission) == (1, 5, 0)


async def test_leave_skips_a_waiter_cancelled_in_the_same_moment() -> None:
    """Cancelled first, then a place gets free, before the cancelled one could run."""
    admission = Admission(max_active=1, max_queued=9, max_bytes=10)
    await admission.enter(5)
    first, second = asyncio.create_task(admission.enter(5)), asyncio.create_task(admission.enter(5))
    await _turn()
    first.cancel()
    admission.leave(5)
    await second
    with pytest.raises(asyncio.CancelledError):
        await first
    assert _books(admission) == (1, 5, 0)


def test_admission_without_room_is_a_configuration_error() -> None:
    """An engine that can't hold one sequence would only ever refuse."""
    with pytest.raises(ConfigError):
        Admission(max_active=0, max_queued=1, max_bytes=1)
