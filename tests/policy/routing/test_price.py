"""The price of memory."""

import pytest

from kvpool.policy.routing.price import Regret, memory_s, token_price_s


def test_memory_costs_only_what_does_not_fit() -> None:
    """Free room is free, and there is no step where it ends."""
    assert memory_s(0.5, 100, 100) == 0
    assert memory_s(0.5, 101, 100) == pytest.approx(0.5)
    assert memory_s(0.5, 300, 100) == pytest.approx(100.0)


def test_price_is_chance_times_recompute_and_a_chance_is_at_most_one() -> None:
    """uses a second x seconds it stays x seconds to recompute."""
    assert token_price_s(0.001, 100.0, 2e-4) == pytest.approx(2e-5)
    assert token_price_s(1.0, 100.0, 2e-4) == pytest.approx(2e-4)


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
