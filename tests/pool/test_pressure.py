"""How scarce memory is on a node: what left and was written again, by what it cost."""

import pytest

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool.state import PoolState
from kvpool.pool.values import Granted, Reserve
from kvpool.units import SECOND

BLOCK = 1024


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def put(pool: PoolState, number: int, *, depth: int = 0, near: bool = False, passing: bool = False) -> None:
    reserved = pool.reserve(
        [Reserve(key_of(number), None, depth, BLOCK, near=near)], owner="w", lease_ns=SECOND, now_ns=number
    )  # fmt: skip
    assert isinstance(reserved.grants[0], Granted)
    assert pool.commit(reserved.lease_id, [key_of(number)], number, passing=passing, clean=True) == (True,)


def test_price_is_what_left_and_was_written_again() -> None:
    """Room is free while there is some. Four leave, one of them comes back: a quarter of a token for each, more for a deep one."""
    for depth, cost in ((0, 1.0), (262_144, 2.0)):
        pool = PoolState(4 * BLOCK, PrefixLru())
        for number in range(4):
            assert pool.pressure() == ((4 - number) * BLOCK, 0)
            put(pool, number, depth=depth)
        for number in range(4, 7):
            put(pool, number, depth=depth)
        assert pool.pressure() == (0, 0)
        put(pool, 0, depth=depth)
        assert pool.pressure().price == pytest.approx(cost / 4, rel=0.01)
        put(pool, 99)
        assert pool.pressure().price == pytest.approx(cost / 5, rel=0.01)


def test_what_another_place_still_has_is_no_loss() -> None:
    """Near copies, blocks that passed by, and all blocks when a slower tier keeps them."""
    for guard, how in ((False, {"near": True}), (False, {"passing": True}), (True, {})):
        pool = PoolState(2 * BLOCK, PrefixLru())
        pool.guard(guard)
        for number in (0, 1, 2, 3, 0, 1):
            put(pool, number, **how)
        assert pool.counters()["evicted"] == 4
        assert pool.pressure().price == 0
