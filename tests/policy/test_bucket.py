"""The average rate holds, whatever the sizes."""

import random

import pytest

from kvpool.errors import ConfigError
from kvpool.policy.bucket import TokenBucket
from kvpool.units import SECOND


def test_taker_waits_as_long_as_its_tokens_take() -> None:
    """A tenth of a second's worth goes at once, the rest at the rate; a rest gathers no more than that again."""
    bucket = TokenBucket(1000.0, 0)
    assert bucket.take(100, 0) == 0
    assert bucket.take(500, 0) == SECOND // 2
    assert bucket.take(0, SECOND // 2) == 0
    assert bucket.take(200, 100 * SECOND) == SECOND // 10


def test_rate_holds_on_the_average_for_any_sizes_and_pauses() -> None:
    """Nobody gets more than burst + rate x time."""
    rng, bucket, now_ns, sent = random.Random(3), TokenBucket(5000.0, 0), 0, 0.0
    for _ in range(500):
        size = rng.uniform(0, 2000)
        now_ns += bucket.take(size, now_ns) + rng.choice((0, 0, SECOND // 7))
        sent += size
        assert sent <= 500 + 5000 * now_ns / SECOND + 1e-3


def test_changed_rate_counts_from_now_and_senseless_ones_are_refused() -> None:
    """An operator changes the rate in the middle."""
    bucket = TokenBucket(1000.0, 0)
    bucket.take(1100, 0)
    bucket.change(10_000.0, 0)
    assert bucket.take(0, 0) == SECOND // 10
    with pytest.raises(ConfigError, match="above 0"):
        bucket.change(0, 1)


def test_time_that_goes_back_gives_nothing() -> None:
    """Only progress earns tokens."""
    bucket = TokenBucket(1000.0, SECOND)
    bucket.take(100, SECOND)
    assert bucket.take(100, 0) == SECOND // 10
