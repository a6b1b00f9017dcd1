"""How many prompt tokens ride beside answers: no more than these can bear, and never none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.policy.pace import LONGEST, PARTS, longest, part, riding

CHUNKS = st.integers(1, 4096)
TARGET = 1.0


def simulate(chunk: int, row: float, steps: list[float], comes: list[int]) -> list[tuple[float, float, int, float]]:
    """Passes as (begin, length, prompt tokens, least ahead at the end), each with its step; at each of `comes` an answer begins."""
    now, answers, passes = 0.0, [0.0], []
    made = [0]
    for number, step in enumerate(steps):
        new = comes.count(number)
        answers, made = answers + [now] * new, made + [0] * new
        least = min(count * TARGET - (now - began) for began, count in zip(answers, made, strict=True))
        tokens = riding(longest(TARGET, least), chunk, lambda n, step=step: step + row * n)  # type: ignore[misc]
        took = step + row * tokens
        made = [count + 1 for count in made]
        ahead = min(count * TARGET - (now + took - began) for began, count in zip(answers, made, strict=True))
        passes.append((now, took, tokens, ahead))
        now += took
    return passes


@given(CHUNKS, st.floats(0, 1), st.lists(st.floats(0, 0.9), min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_no_answer_falls_behind_where_a_step_and_one_part_fit(chunk: int, load: float, steps: list[float], comes: list[int]) -> None:
    """Whatever a step takes and whoever comes: nobody is behind after any pass, no gap is longer than the bound, prompts move on."""
    row = load * 0.1 * TARGET / part(chunk)
    for _, took, tokens, ahead in simulate(chunk, row, steps, comes):
        assert ahead >= -1e-9
        assert took <= LONGEST * TARGET + 1e-9
        assert min(chunk, part(chunk)) <= tokens <= chunk


@given(CHUNKS, st.floats(1, 50), st.integers(1, 30))
def test_answers_that_are_behind_leave_prompts_one_part(chunk: int, step: float, passes: int) -> None:
    """Steps that take longer than the target by themselves: a part in each pass, no more and no less."""
    assert {tokens for _, _, tokens, _ in simulate(chunk, 1.0, [step] * passes, [])} == {min(chunk, part(chunk))}


@given(st.integers(PARTS, 4096), st.floats(-3, 10), st.floats(1e-6, 1), st.floats(0, 3))
def test_as_much_rides_as_fits(chunk: int, ahead: float, row: float, step: float) -> None:
    """One part more would take too long, or is more than a chunk."""
    limit = longest(TARGET, ahead)
    tokens = riding(limit, chunk, lambda n: step + row * n)
    assert tokens == chunk or tokens % part(chunk) == 0
    assert tokens == part(chunk) or step + row * tokens <= limit
    assert tokens == chunk or step + row * min(chunk, tokens + part(chunk)) > limit


@pytest.mark.parametrize(("ahead", "expected"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0), (70.0, 2.0), (-0.25, 0.75), (-9.0, -8.0)])
def test_credit_is_spent_in_gaps_of_at_most_two_targets_and_debt_is_paid_at_once(ahead: float, expected: float) -> None:
    """By hand."""
    assert longest(TARGET, ahead) == expected
