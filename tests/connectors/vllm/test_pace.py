"""A load is worth as long as computing would take, by what the engine's steps took."""

from kvpool.connectors.vllm.pace import LEAST_NS, Pace
from kvpool.units import SECOND


def test_load_may_take_as_long_as_computing() -> None:
    """1,000 tokens in two seconds: 500 tokens are worth one."""
    pace = Pace()
    assert pace.limit_ns(500, 5 * SECOND) == 5 * SECOND
    pace.end(pace.begin(1000, 10 * SECOND), 12 * SECOND)
    assert pace.limit_ns(500, 5 * SECOND) == SECOND
    assert pace.limit_ns(50_000, 5 * SECOND) == 5 * SECOND
    assert pace.limit_ns(1, 5 * SECOND) == LEAST_NS


def test_steps_planned_ahead_take_their_own_time_only() -> None:
    """The second is planned while the first is computed, and done a second after it."""
    pace = Pace()
    first, second = pace.begin(1000, 0), pace.begin(1000, 1)
    pace.end(first, SECOND)
    pace.end(second, 2 * SECOND)
    assert pace.rate == 1000


def test_small_steps_and_unknown_ones_are_not_timed() -> None:
    """Decoding one token says nothing of prompts; a slower step is forgotten slowly."""
    pace = Pace()
    assert pace.begin(1, 0) == 0
    pace.end(0, SECOND)
    pace.end(7, SECOND)
    assert pace.rate == 0
    pace.end(pace.begin(1000, 0), SECOND)
    pace.end(pace.begin(1000, SECOND), 11 * SECOND)
    assert pace.rate == 900
