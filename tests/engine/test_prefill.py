"""Chunk plans and the time a recomputation would take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine.prefill import LOAD_FLOOR_NS, Rate, chunk_plan
from kvpool.units import SECOND


def test_chunk_plan_cuts_at_absolute_multiples() -> None:
    """Wherever the cached prefix ends, later chunks are the same as without it."""
    assert chunk_plan(0, 600, 256) == [(0, 256), (256, 512), (512, 600)]
    assert chunk_plan(100, 600, 256) == [(100, 256), (256, 512), (512, 600)]
    assert chunk_plan(256, 512, 256) == [(256, 512)]
    assert chunk_plan(511, 512, 256) == [(511, 512)]
    assert chunk_plan(5, 5, 256) == []


@given(st.integers(0, 500), st.integers(0, 500), st.integers(1, 64))
def test_chunk_plan_covers_the_range_once(start: int, length: int, chunk: int) -> None:
    """No token is computed twice or left out, and no pass crosses a boundary or is longer than a chunk."""
    plan = chunk_plan(start, start + length, chunk)
    assert [t for a, b in plan for t in range(a, b)] == list(range(start, start + length))
    assert all(a // chunk == (b - 1) // chunk and a < b for a, b in plan)


def test_rate_without_measurements_gives_the_floor() -> None:
    """Before the first chunk nothing is known; a load still gets its floor."""
    assert Rate().tokens_per_s == 0
    assert Rate().load_budget_ns(100_000) == LOAD_FLOOR_NS


def test_rate_budget_is_the_time_to_recompute_but_at_least_the_floor() -> None:
    """Never slower than recompute."""
    rate = Rate()
    rate.add(200, SECOND)
    assert rate.tokens_per_s == pytest.approx(200)
    assert rate.load_budget_ns(1000) == pytest.approx(5 * SECOND)
    assert rate.load_budget_ns(10) == LOAD_FLOOR_NS


def test_rate_follows_a_change_and_ignores_single_tokens() -> None:
    """A machine that got slower is noticed within a few thousand tokens; decode-sized passes don't look like a slow prefill."""
    rate = Rate()
    for _ in range(100):
        rate.add(256, SECOND)
        rate.add(1, SECOND)
    assert rate.tokens_per_s == pytest.approx(256)
    for _ in range(40):
        rate.add(256, 4 * SECOND)
    assert 64 <= rate.tokens_per_s < 75
