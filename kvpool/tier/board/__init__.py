"""The board: an index of a node's blocks that every process of its host reads without asking, and the cells by which readers are seen."""

from kvpool.tier.board.board import Board
from kvpool.tier.board.cell import Cell, Hold
from kvpool.tier.board.found import Found, Place
from kvpool.tier.board.layout import Flag, board_slots
from kvpool.tier.board.order import ORDERED
from kvpool.tier.board.reader import BoardReader

__all__ = ["ORDERED", "Board", "BoardReader", "Cell", "Flag", "Found", "Hold", "Place", "board_slots"]
