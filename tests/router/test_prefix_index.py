"""Hints are bounded, heads outlive tails, and a restarted worker starts empty."""

import pytest

from kvpool.block import BlockKey, chain_keys
from kvpool.policy.routing import WorkerRef
from router.index import PrefixIndex

ONE = WorkerRef("decode", "1" * 32, 1)
TWO = WorkerRef("decode", "2" * 32, 1)


def _keys(tokens: int, start: int = 0) -> list[BlockKey]:
    return chain_keys(b"\0" * 32, range(start, start + 4 * tokens), 4)


def test_longest_counts_leading_blocks_only() -> None:
    """A block without those before it can't be used."""
    index = PrefixIndex(100)
    keys = _keys(10)
    index.learn(ONE, keys[:6])
    assert index.longest(ONE, keys) == 6
    assert index.longest(ONE, keys[3:]) == 3
    assert index.longest(ONE, _keys(3, start=1)) == 0
    assert index.longest(TWO, keys) == 0


def test_full_index_forgets_tails_of_the_oldest_chain_first() -> None:
    """Memory is bounded, and what stays must still be a prefix."""
    index = PrefixIndex(8)
    old, new = _keys(6), _keys(4, start=1000)
    index.learn(ONE, old)
    index.learn(ONE, new)
    assert len(index) == 8
    assert index.longest(ONE, new) == 4
    assert index.longest(ONE, old) == 4


def test_chain_longer_than_the_index_keeps_its_head() -> None:
    """The tail of a chain is worth nothing alone."""
    index = PrefixIndex(5)
    keys = _keys(9)
    index.learn(ONE, keys)
    assert index.longest(ONE, keys) == 5
    assert len(index) == 5


def test_new_incarnation_starts_empty_and_ends_the_old_one() -> None:
    """A restarted process holds nothing, whatever its predecessor held."""
    index = PrefixIndex(100)
    keys = _keys(4)
    index.learn(ONE, keys)
    reborn = ONE._replace(incarnation=2)
    assert index.longest(reborn, keys) == 0
    index.learn(reborn, keys[:1])
    assert index.longest(ONE, keys) == 0
    assert index.longest(reborn, keys) == 1


def test_worker_that_is_gone_is_forgotten() -> None:
    """Workers come and go for months; the index must not grow with them."""
    index = PrefixIndex(100)
    index.learn(ONE, _keys(4))
    index.learn(TWO, _keys(2))
    index.forget(ONE)
    index.forget(ONE)
    assert len(index) == 2


def test_index_without_room_is_refused() -> None:
    """It could never answer."""
    with pytest.raises(ValueError, match="at least 1"):
        PrefixIndex(0)
