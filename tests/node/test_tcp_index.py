"""The board as an index: what can't be held isn't there."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvpool.block import BlockKey
from kvpool.node.tcp_index import BoardIndex
from kvpool.tier.board import Board, BoardReader, Cell
from kvpool.units import MIB

NODE = "0a" * 16


@dataclass
class Rig:
    board: Board
    index: BoardIndex


@pytest.fixture
def rig() -> Iterator[Rig]:
    board, cell = Board.create(NODE, 1, max_blocks=256, capacity=8 * MIB), Cell.create(holds=8)
    board.attach(cell.fd)
    for number in range(20):
        board.publish(key(number), number * 8192, 1000 + number)
    yield Rig(board, BoardIndex(BoardReader(board.read_fd, cell, NODE, 1), cell))
    cell.close()
    board.close()


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "little") * 4)


def joined(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def test_probe_says_what_is_published(rig: Rig) -> None:
    """And no more once it is withdrawn."""
    assert rig.index.probe(joined(3, 99, 5)) == b"\1\0\1"
    rig.board.withdraw(key(3))
    assert rig.index.probe(joined(3, 99, 5)) == b"\0\0\1"


def test_taken_frames_are_held_until_released_and_count_as_used(rig: Rig) -> None:
    """Those between absent ones, and such of another length, included."""
    taken = rig.index.take(joined(99, 2, 3, 98, 7), [5, 1002, 1004, 5, 1007])
    assert taken.statuses == b"\0\1\0\0\1"
    assert list(taken.places) == [(2 * 8192, 1002), (7 * 8192, 1007)]
    assert rig.board.held(key(2))
    assert rig.board.withdraw(key(7))
    taken.release()
    assert not rig.board.held(key(2))
    assert rig.board.holding() == 0
    assert rig.board.touched(10) == [key(2)]  # of one that has left nobody wants to know


def test_nothing_there_holds_nothing(rig: Rig) -> None:
    """And releasing it is fine."""
    taken = rig.index.take(joined(50, 51), [1, 1])
    assert (taken.statuses, list(taken.places)) == (b"\0\0", [])
    taken.release()
    assert rig.board.holding() == 0


def test_one_frame_is_taken_as_many_are(rig: Rig) -> None:
    """Its way is a shorter one: held, used, absent, of another length, and no room to hold it."""
    taken = rig.index.take(joined(2), [1002])
    assert (taken.statuses, list(taken.places)) == (b"\1", [(2 * 8192, 1002)])
    assert rig.board.held(key(2))
    for other in (rig.index.take(joined(50), [1]), rig.index.take(joined(2), [1003])):
        assert (other.statuses, list(other.places)) == (b"\0", [])
        other.release()
    rest = rig.index.take(joined(*range(3, 10)), [1000 + number for number in range(3, 10)])
    assert rest.statuses == b"\1" * 7
    assert rig.index.take(joined(11), [1011]).statuses == b"\0"
    taken.release()
    rest.release()
    assert rig.board.holding() == 0
    assert rig.board.touched(10)[0] == key(2)


def test_more_than_the_cell_holds_are_not_there(rig: Rig) -> None:
    """The client asks in another way; what was held before is not let go."""
    first = rig.index.take(joined(0, 1, 2), [1000, 1001, 1002])
    assert first.statuses == b"\1\1\1"
    assert rig.index.take(joined(*range(3, 9)), [1000 + number for number in range(3, 9)]).statuses == bytes(6)
    assert rig.board.holding() == 3
    first.release()
    assert rig.board.holding() == 0
