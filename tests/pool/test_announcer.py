"""Boards keep their promise to the pool: the twin, and the one that a node has."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import pytest

from kvpool.block import BlockKey
from kvpool.node.sessions import Announced
from kvpool.testing.announcer_kit import AnnouncerKit, Desk
from kvpool.testing.board_twin import BoardTwin
from kvpool.tier.board import Board, BoardReader, Cell, Flag

NODE: Final = "0" * 32


class TestBoardTwin(AnnouncerKit):
    """The board in memory."""

    @pytest.fixture
    def desk(self) -> Desk:
        board = BoardTwin()

        def find(key: BlockKey) -> tuple[int, int, bool] | None:
            record = board.records.get(key)
            return None if record is None else (record.offset, record.length, record.unverified)

        def hold(key: BlockKey) -> Callable[[], None] | None:
            number = board.hold(key)
            return partial(board.release, number) if number else None

        return Desk(board, find, hold)


class TestNodeBoard(AnnouncerKit):
    """The board that other processes map, and a reader with a cell."""

    @pytest.fixture
    def desk(self) -> Iterator[Desk]:
        board, cell = Board.create(NODE, 1, max_blocks=64, capacity=1 << 20), Cell.create()
        board.attach(cell.fd)
        reader = BoardReader(board.read_fd, cell, NODE, 1)

        def find(key: BlockKey) -> tuple[int, int, bool] | None:
            place = reader.find_one(key, 1)
            return None if place is None else (place.offset, place.length, bool(place.flags & Flag.UNVERIFIED))

        def hold(key: BlockKey) -> Callable[[], None] | None:
            found = reader.find([key], 1)
            held = reader.hold(found, 1) if found.leading() else None
            return None if held is None else held.release

        yield Desk(Announced(board), find, hold)
        board.close()
        cell.close()
