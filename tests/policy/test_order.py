"""The order of prompts on one worker."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.policy.order import AGING, place

TOKENS = st.integers(0, 1 << 20)


@given(TOKENS, TOKENS, TOKENS, TOKENS)
def test_nobody_is_passed_by_who_is_longer_or_comes_too_late(left: int, before: int, other: int, later: int) -> None:
    """A later prompt comes first only if less is left of it, and it came before left / AGING tokens were computed."""
    if place(other, before + later) < place(left, before):
        assert other < left
        assert later < left / AGING
