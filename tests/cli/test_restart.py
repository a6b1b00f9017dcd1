"""The backoff, alone."""

from kvpool.cli.restart import HEALTHY_LIFE_NS, Backoff
from kvpool.units import SECOND


def test_backoff_doubles_up_to_its_limit() -> None:
    """A process that can't start must not be started in a tight loop, nor be given up."""
    backoff = Backoff()
    assert [backoff.died(0) / SECOND for _ in range(7)] == [0.5, 1, 2, 4, 8, 8, 8]
    assert backoff.streak == 7


def test_backoff_after_a_healthy_life_starts_over() -> None:
    """A crash after an hour of service deserves a quick restart, however many came before."""
    backoff = Backoff()
    for _ in range(4):
        backoff.died(0)
    assert backoff.died(HEALTHY_LIFE_NS - 1) == 8 * SECOND
    assert backoff.died(HEALTHY_LIFE_NS) == SECOND // 2
    assert backoff.streak == 1


def test_backoff_after_very_many_deaths_stays_at_its_limit() -> None:
    """A week of crashes overflows nothing."""
    backoff = Backoff()
    assert {backoff.died(0) for _ in range(100_000)} == {SECOND // 2, SECOND, 2 * SECOND, 4 * SECOND, 8 * SECOND}
