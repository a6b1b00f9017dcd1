"""The price of memory."""

import pytest

from kvpool.policy.routing.price import Regret, memory_s


def test_memory_costs_only_what_does_not_fit() -> None:
    """Free room is free, and there is no step where it ends."""
    assert memory_s(0.5, 100, 100) == 0
    assert memory_s(0.5, 101, 100) == pytest.approx(0.5)
    assert memory_s(0.5, 300, 100) == pytest.approx(100.0)


def test_regret_is_what_was_asked_for_again_per_token_that_left() -> None:
    """Ten blocks of 512 left, two were wanted: 2 x .1 s over 5,120 tokens; each counts once."""
    regret = Regret()
    for key in range(10):
        regret.left(key, 512, 0.1)
    assert regret.price_s == 0
    for key in (3, 4, 4, 99):
        regret.wanted(key)
    assert regret.price_s == pytest.approx(0.2 / 5120, rel=0.01)


def test_regret_remembers_so_many_blocks() -> None:
    """Bounded: the oldest is forgotten."""
    regret = Regret(keep=2)
    for key in range(3):
        regret.left(key, 512, 0.1)
    regret.wanted(0)
    assert regret.price_s == 0
