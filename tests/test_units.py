"""Sizes and durations as people write and read them."""

import pytest

from kvpool.errors import ConfigError
from kvpool.units import MS, SECOND, US, format_age, parse_duration


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("30m", 1800 * SECOND),
        ("1.5s", 1500 * MS),
        ("2h", 7200 * SECOND),
        ("7d", 7 * 86_400 * SECOND),
        ("250ms", 250 * MS),
        ("5us", 5 * US),
        ("5µs", 5 * US),
        ("1h30m", 5400 * SECOND),
        (" 1 h 30 m ", 5400 * SECOND),
        ("0.1s", 100 * MS),
        ("0s", 0),
    ],
)
def test_duration_written_by_people_is_read(text: str, expected_ns: int) -> None:
    """What an operator would type means what they think it means, to the nanosecond."""
    assert parse_duration(text) == expected_ns


@pytest.mark.parametrize("text", ["", "30", "m", "-1s", "1x", "1,5s", "s1", "1s2", "1e3s", "1.s"])
def test_duration_that_is_not_one_says_how_to_write_it(text: str) -> None:
    """A bare number might be seconds or minutes; guessing would pin for the wrong time."""
    with pytest.raises(ConfigError, match="1h30m"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("duration_ns", "expected"),
    [
        (0, "0 ms"),
        (250 * MS, "250 ms"),
        (12 * SECOND + MS, "12 s"),
        (90 * SECOND, "1 m 30 s"),
        (7500 * SECOND, "2 h 5 m"),
        (3600 * SECOND, "1 h"),
        (3 * 86_400 * SECOND + 4 * 3600 * SECOND + 59 * SECOND, "3 d 4 h"),
    ],
)
def test_age_is_shown_in_its_two_largest_units(duration_ns: int, expected: str) -> None:
    """Nobody reads 273600.00 s."""
    assert format_age(duration_ns) == expected
