"""A small board with its reader and cell."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from kvpool.block import BlockKey
from kvpool.tier.board import Board, BoardReader, Cell
from kvpool.tier.board.layout import KEY

NODE = "ab" * 16
NOW = 1_000_000


class World(NamedTuple):
    """One owner, one reader, and the number of the reader's cell."""

    board: Board
    reader: BoardReader
    cell: Cell
    number: int


@pytest.fixture
def world() -> Iterator[World]:
    """64 slots in 16 buckets; a cell for 16 holds and 8 touches."""
    board, cell = Board.create(NODE, 7, max_blocks=32, capacity=1 << 30), Cell.create(holds=16, touches=8)
    number = board.attach(cell.fd)
    yield World(board, BoardReader(board.read_fd, cell, NODE, 7), cell, number)
    board.close()
    cell.close()


def crafted(tag: int, first: int, second: int, number: int) -> BlockKey:
    """A key with this tag and these buckets."""
    return BlockKey(KEY.pack(tag, first, second, number))
