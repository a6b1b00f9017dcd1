"""The board: what the pool announces, and that it spares what is held."""

from collections.abc import Sequence
from hashlib import sha256

import pytest

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import NO_SPACE, Granted, InvariantError, PoolLimits, PoolState, Reserve
from kvpool.pool.deadlines import NEVER_NS
from kvpool.pool.resident import Resident
from kvpool.testing.board_twin import BoardTwin, Record

KEYS = [BlockKey(sha256(b"%d" % i).digest()) for i in range(10)]
SIZE = 64


def pool_of(units: int, *numbers: int, ttl_ns: int = 0) -> tuple[PoolState, BoardTwin]:
    board = BoardTwin()
    pool = PoolState(units * SIZE, PrefixLru(), board=board)
    put(pool, *numbers, ttl_ns=ttl_ns)
    return pool, board


def put(pool: PoolState, *numbers: int, ttl_ns: int = 0) -> None:
    for number in numbers:
        got = pool.reserve([Reserve(KEYS[number], None, 0, SIZE, ttl_ns)], owner="w", lease_ns=10, now_ns=0)
        pool.moved(got.moves)
        assert pool.commit(got.lease_id, [KEYS[number]], 0) == (True,)


def test_block_is_announced_from_its_commit_until_it_leaves() -> None:
    """Not while it is written, and not a moment after it went."""
    pool, board = pool_of(4)
    got = pool.reserve([Reserve(KEYS[0], None, 0, 50, 20)], owner="w", lease_ns=10, now_ns=0)
    assert board.records == {}
    pool.commit(got.lease_id, [KEYS[0]], 5, unverified=True)
    assert board.records == {KEYS[0]: Record(KEYS[0], 0, 50, 25, True)}
    pool.tick(25)
    assert board.records == {}
    put(pool, 1)
    assert board.records[KEYS[1]] == Record(KEYS[1], 0, SIZE, NEVER_NS, False)
    pool.discard(KEYS[1])
    assert board.records == {}


def test_held_blocks_are_passed_over_by_eviction() -> None:
    """Somebody looks at their bytes: the next in order leave instead."""
    pool, board = pool_of(4, 0, 1, 2, 3)
    hold = board.hold(KEYS[0])
    put(pool, 4)
    assert set(pool.committed_keys()) == {KEYS[0], KEYS[2], KEYS[3], KEYS[4]}
    assert pool.counters()["evicted"] == 1
    board.release(hold)
    put(pool, 5)
    assert pool.locate(KEYS[0]) is None
    pool.check()


def test_block_held_at_its_withdrawal_is_doomed_and_the_next_one_leaves() -> None:
    """A reader may come at the last moment. Its bytes stay until it has gone, and no longer."""
    pool, board = pool_of(4, 0, 1, 2, 3)
    board.late = {KEYS[0]}
    put(pool, 4)
    assert set(pool.committed_keys()) == {KEYS[2], KEYS[3], KEYS[4]}
    assert (pool.counters()["evicted"], pool.books().pinned) == (2, SIZE)
    assert pool.story(KEYS[0])[-2:] == ["0 ns: held, so doomed", "0 ns: evicted"]
    pool.check()
    pool.tick(1)
    assert pool.books().pinned == SIZE
    board.holds.clear()
    pool.tick(1)
    assert pool.books().pinned == 0
    pool.check()


def test_doomed_block_no_longer_held_makes_room_before_anything_is_evicted() -> None:
    """What nobody looks at any more is free, whether or not somebody ticked."""
    pool, board = pool_of(4, 0, 1, 2, 3)
    board.hold(KEYS[0])
    assert pool.discard(KEYS[0])
    assert (pool.books().pinned, KEYS[0] in board.records) == (SIZE, False)
    board.holds.clear()
    put(pool, 4)
    assert pool.counters()["evicted"] == 0
    assert pool.locate(KEYS[4]) == (0, SIZE)
    pool.check()


def test_block_whose_ttl_is_over_waits_for_who_holds_it() -> None:
    """It isn't found any more; its bytes stay."""
    pool, board = pool_of(2, 0, ttl_ns=10)
    board.hold(KEYS[0])
    assert pool.tick(10) == 1
    assert (pool.locate(KEYS[0]), pool.books().pinned) == (None, SIZE)
    pool.check()
    put(pool, 0)
    assert pool.locate(KEYS[0]) == (SIZE, SIZE)
    assert board.records[KEYS[0]].offset == SIZE
    pool.check()


def test_discarded_block_waits_for_its_lease_and_then_for_who_holds_it() -> None:
    """Two ways to look at bytes, and both must have ended."""
    pool, board = pool_of(2, 0)
    got = pool.acquire([KEYS[0]], owner="r", lease_ns=10, now_ns=0)
    board.hold(KEYS[0])
    pool.discard(KEYS[0])
    pool.release(got.lease_id, 1)
    assert pool.books().pinned == SIZE
    pool.check()
    board.holds.clear()
    pool.tick(1)
    assert pool.books().pinned == 0
    pool.check()


def scattered() -> tuple[PoolState, BoardTwin]:
    """Two holes of one unit each, a block between and one behind them; all of them dirty, so that room takes a move."""
    pool, board = pool_of(4, 0, 1, 2, 3)
    pool.guard(True)
    pool.mark(KEYS[:4], dirty=True)
    pool.discard(KEYS[0])
    pool.discard(KEYS[2])
    return pool, board


def test_block_that_moves_is_announced_again_once_its_bytes_are_there() -> None:
    """Between, the core finds it and the board doesn't; and nothing else may be asked."""
    pool, board = scattered()
    got = pool.reserve([Reserve(KEYS[4], None, 0, 2 * SIZE)], owner="w", lease_ns=10, now_ns=1)
    assert isinstance(got.grants[0], Granted)
    moved = next(key for key in (KEYS[1], KEYS[3]) if key not in board.records)
    assert pool.locate(moved) is not None
    with pytest.raises(InvariantError, match="1 blocks were moved"):
        pool.reserve([], owner="w", lease_ns=10, now_ns=1)
    pool.moved(got.moves)
    assert board.records[moved].offset == got.moves[0].target
    pool.check()


def test_plan_in_which_a_block_turns_out_held_is_dropped() -> None:
    """It is as if nothing had been planned: all are announced where they were."""
    pool, board = scattered()
    before = dict(board.records)
    board.late = {KEYS[1], KEYS[3]}
    got = pool.reserve([Reserve(KEYS[4], None, 0, 2 * SIZE)], owner="w", lease_ns=10, now_ns=1)
    assert (got.lease_id, got.moves, got.waiting) == (0, (), True)
    assert board.records == before
    assert pool.counters()["moved_bytes"] == 0
    pool.check()
    assert pool.reserve([Reserve(KEYS[4], None, 0, 2 * SIZE)], owner="w", lease_ns=10, now_ns=1).moves == ()
    board.holds.clear()
    assert pool.reserve([Reserve(KEYS[4], None, 0, 2 * SIZE)], owner="w", lease_ns=10, now_ns=1).moves != ()


def test_board_without_room_leaves_blocks_out() -> None:
    """A reader doesn't find them there, and asks."""
    board = BoardTwin(room=1)
    pool = PoolState(4 * SIZE, PrefixLru(), board=board)
    put(pool, 0, 1)
    assert list(board.records) == [KEYS[0]]
    assert pool.discard(KEYS[1])
    assert pool.discard(KEYS[0])
    assert pool.books().free == 4 * SIZE


class _Clung:
    """A board whose readers hold all that they see, until `held_now` says otherwise; counts how often it is asked."""

    def __init__(self) -> None:
        self.held_now = True
        self.asked = 0

    def publish(self, blocks: Sequence[Resident]) -> None:
        """Nothing to note."""

    def verified(self, key: BlockKey) -> None:
        """Nothing to note."""

    def withdraw(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        return set(keys) if self.held_now else set()

    def watched(self) -> bool:
        return self.held_now

    def held(self, key: BlockKey) -> bool:
        self.asked += 1
        return self.held_now


@pytest.mark.parametrize("doomed", [False, True])
def test_readers_that_hold_thousands_of_blocks_do_not_make_each_call_long(doomed: bool) -> None:
    """One event loop serves everybody. What a call doesn't look at, later ones and ticks do."""
    count, board = 12_000, _Clung()
    pool = PoolState(count * SIZE, PrefixLru(), board=board)
    keys = [BlockKey(sha256(b"many/%d" % i).digest()) for i in range(count)]
    got = pool.reserve([Reserve(key, None, 0, SIZE) for key in keys], owner="w", lease_ns=10, now_ns=0)
    assert all(pool.commit(got.lease_id, keys, 0))
    if doomed:
        assert all(pool.discard(key) for key in keys)
    board.asked = 0
    got = pool.reserve([Reserve(KEYS[0], None, 0, SIZE)], owner="w", lease_ns=10, now_ns=0)
    assert got.grants[0] is NO_SPACE
    assert 0 < board.asked < 5000
    board.asked = 0
    pool.tick(1)
    assert board.asked < 5000
    board.held_now = False
    for now_ns in range(2, 2 + 12):
        pool.tick(now_ns)
    assert pool.books().pinned == 0
    got = pool.reserve([Reserve(KEYS[0], None, 0, SIZE)], owner="w", lease_ns=10, now_ns=20)
    assert isinstance(got.grants[0], Granted)
    pool.check()


def test_block_that_was_checked_where_it_lies_is_verified() -> None:
    """Only the second use makes a check worth it; what was found right elsewhere was another block's bytes."""
    pool, board = pool_of(4)
    got = pool.reserve([Reserve(KEYS[0], None, 0, 64), Reserve(KEYS[1], None, 0, 64)], owner="w", lease_ns=10, now_ns=0)
    pool.commit(got.lease_id, KEYS[:1], 0, unverified=True)
    pool.commit(got.lease_id, KEYS[1:2], 0)
    pool.touch(KEYS[:2], 0)
    assert pool.doubtful(KEYS) == []
    pool.touch(KEYS[:2], 0)
    assert pool.doubtful(KEYS) == [KEYS[0]]
    place = pool.locate(KEYS[0])
    assert place is not None
    assert pool.verified([(KEYS[0], place._replace(offset=place.offset + 64)), (KEYS[3], place)]) == 0
    assert board.records[KEYS[0]].unverified
    assert pool.verified([(KEYS[0], place)]) == 1
    assert not board.records[KEYS[0]].unverified
    assert pool.verified([(KEYS[0], place)]) == 0
    assert pool.doubtful(KEYS) == []


def test_touch_is_a_use_without_a_lease() -> None:
    """What readers of the board used stays as long as what others acquired; what is gone meanwhile is no miss."""
    pool, _ = pool_of(2, 0, 1)
    pool.touch([KEYS[5], KEYS[0]], 7)
    view = pool.view(KEYS[0])
    assert view is not None
    assert (view.hits, view.used_ns) == (1, 7)
    assert (pool.counters()["hits"], pool.counters()["misses"], pool.books().read_leases) == (1, 0, 0)
    put(pool, 2)
    assert set(pool.committed_keys()) == {KEYS[0], KEYS[2]}


def test_held_blocks_are_no_room_for_a_large_one() -> None:
    """A block that can't fit between what is held must not empty the pool."""
    board = BoardTwin()
    pool = PoolState(60 * SIZE, PrefixLru(), PoolLimits(), board=board)
    keys = [BlockKey(sha256(b"x%d" % i).digest()) for i in range(60)]
    got = pool.reserve([Reserve(key, None, 0, SIZE) for key in keys], owner="w", lease_ns=10, now_ns=0)
    pool.commit(got.lease_id, keys, 0)
    for number in (19, 39):
        board.hold(keys[number])
    assert pool.reserve([Reserve(KEYS[0], None, 0, 30 * SIZE)], owner="w", lease_ns=10, now_ns=0).lease_id == 0
    assert pool.counters()["evicted"] == 16
    pool.check()
