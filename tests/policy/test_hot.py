"""Which keys are read so often that one copy is too few."""

from hashlib import sha256

import pytest

from kvpool.policy.hot import WINDOW_NS, HotReads


def key(index: int) -> bytes:
    return sha256(str(index).encode()).digest()


@pytest.mark.parametrize("threshold", [1, 2, 4, 5, 16, 300])
def test_key_is_told_once_when_it_reaches_the_threshold(threshold: int) -> None:
    """Each telling costs a copy."""
    reads = HotReads()
    told = [reads.read(key(1), threshold, 5) for _ in range(3 * threshold)]
    assert told.index(True) == threshold - 1
    assert sum(told) == 1


def test_reads_of_another_minute_count_anew() -> None:
    """Hot is what is read often now; what stays hot is told again."""
    reads = HotReads()
    assert not any(reads.read(key(1), 10, 0) for _ in range(9))
    assert not any(reads.read(key(1), 10, WINDOW_NS) for _ in range(9))
    assert reads.read(key(1), 10, 2 * WINDOW_NS - 1)
    assert sum(reads.read(key(1), 10, 2 * WINDOW_NS) for _ in range(10)) == 1


def test_counted_keys_are_bounded_and_a_flood_of_cold_ones_makes_nothing_hot() -> None:
    """Memory must not grow with what is read, and a scan is no heat."""
    reads = HotReads(max_counted=8)
    assert not any(reads.read(key(index), 100, 1) for index in range(5000))
    assert not any(reads.read(key(index), 100, 1) for index in range(20) for _ in range(50))
    assert len(reads._counts) <= 8
