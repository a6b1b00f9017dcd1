"""The price of memory."""

import pytest

from kvpool.policy.price import Regret, memory_s, recompute


def test_memory_costs_only_what_does_not_fit() -> None:
    """Free room is free, and there is no step where it ends."""
    assert memory_s(0.5, 100, 100) == 0
    assert memory_s(0.5, 101, 100) == pytest.approx(0.5)
    assert memory_s(0.5, 300, 100) == pytest.approx(100.0)


def test_deep_blocks_cost_more_to_compute_again() -> None:
    """Attention grows with what is before: linearly, from 1 on."""
    assert recompute(512, 0) == 512
    assert recompute(512, 262_144) == 1024
    assert recompute(1, 100) < recompute(1, 200) < 1.001


def test_regret_is_what_was_asked_for_again_per_token_that_left() -> None:
    """Ten blocks of 512 left, two were wanted: 2 x 600 over 5,120 tokens; each counts once."""
    regret = Regret()
    for key in range(10):
        regret.left(key, 512, 600)
    assert regret.price == 0
    for key in (3, 4, 4, 99):
        regret.wanted(key)
    assert regret.price == pytest.approx(1200 / 5120, rel=0.01)


def test_price_falls_as_what_is_next_gets_old() -> None:
    """Learnt from blocks that left at an age of 100: at 200 half of it."""
    regret = Regret()
    assert regret.at(5) == 0
    for key in range(10):
        regret.left(key, 512, 512, age=100)
    regret.wanted(3)
    assert regret.at(100) == pytest.approx(regret.price)
    assert regret.at(200) == pytest.approx(regret.price / 2)
    assert regret.at(1) == pytest.approx(1.0)  # not a hundred times the tenth that was missed: all of it


def test_regret_remembers_so_many_blocks() -> None:
    """Bounded: the oldest is forgotten."""
    regret = Regret(keep=2)
    for key in range(3):
        regret.left(key, 512, 512)
    regret.wanted(0)
    assert regret.price == 0
