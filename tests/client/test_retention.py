"""Priorities of token ranges become priorities of blocks."""

import pytest

from kvpool.client.retention import Retention, check_retention, priority_of
from kvpool.errors import ConfigError
from kvpool.request.pool import DEFAULT_PRIORITY
from kvpool.units import MS

RANGES = (Retention(0, 32, 90), Retention(16, None, 20, 1500 * MS + 1), Retention(0, 8, 90, 5 * MS))


def test_block_takes_the_highest_priority_that_touches_it() -> None:
    """The system prompt's last block may hold the first tokens of something dull: it is still the system prompt's."""
    assert priority_of(RANGES, 0, 16) == (90, 0)
    assert priority_of(RANGES, 16, 32) == (90, 0)
    assert priority_of(RANGES, 31, 47) == (90, 0)
    assert priority_of(RANGES, 32, 48) == (20, 1501)
    assert priority_of((), 0, 16) == (DEFAULT_PRIORITY, 0)
    assert priority_of((Retention(64, 80, 5),), 0, 64) == (DEFAULT_PRIORITY, 0)


@pytest.mark.parametrize(
    "bad", [Retention(-1, 4, 5), Retention(4, 4, 5), Retention(0, 4, 101), Retention(0, 4, -1), Retention(0, 4, 5, -1)]
)
def test_ranges_that_make_no_sense_are_refused(bad: Retention) -> None:
    """At the caller's edge, before anything is sent."""
    with pytest.raises(ConfigError, match="retention"):
        check_retention([bad])
