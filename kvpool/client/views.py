"""Blocks as arrays without a copy: they lie in the arena of a node of this host, in a mapping that can't be written.

The node neither evicts nor moves what a view shows, until `close`, or until the view's process ends, however it ends. The bytes count as
the node's all the same, so a view that is kept for long keeps them from others. After `close` they may become another block's at any time:
the arrays stay mapped and read as something, so use them no more.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Geometry
from kvpool.client.arrays import blocks_shape, element_type
from kvpool.client.held import Held
from kvpool.client.here import Here
from kvpool.transport.reach import Bytes


class View:
    """The leading blocks of some tokens. Made by `Client.view`; a context manager.

    `tokens`: how many leading tokens are shown, 0 when none is there. `blocks[i]`: a read-only array of the geometry's shape (uint8
    `[payload bytes]` where layers differ); `blocks` is one array over all of them where they lie at equal distances, else a list.
    """

    def __init__(self, tokens: int, blocks: npt.NDArray[Any] | list[npt.NDArray[Any]], held: Held | None) -> None:
        self.tokens = tokens
        self.blocks = blocks
        self._held = held
        self._open = True

    def valid(self) -> bool:
        """Whether the node has kept the bytes in place all the time: it and its session are there, and the view is open."""
        return self._open and (self._held is None or self._held.reach.alive)

    def close(self) -> None:
        """Let the node have the bytes back; twice is fine."""
        self._open = False
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()


def view_of(here: Here, geometry: Geometry, keys: Sequence[BlockKey]) -> View:
    """A view of the leading blocks of `keys` that one node of this host has in memory now."""
    n_tokens = geometry.block_tokens
    held = here.hold(keys)
    if held is None:
        return View(0, [], None)
    try:
        starts = here.shown(held, keys, [n_tokens] * len(keys))
        blocks = _shaped(held.memory, starts, geometry)
    except BaseException:
        held.release()
        raise
    held.touch(len(starts))
    return View(len(starts) * n_tokens, blocks, held)


def _shaped(memory: Bytes, starts: list[int], geometry: Geometry) -> npt.NDArray[Any] | list[npt.NDArray[Any]]:
    """The payloads that begin at `starts` with the geometry's element type and shape: one array where they lie at equal distances."""
    shape = blocks_shape(geometry, len(starts))
    dtype = element_type(geometry) if len(shape) > 2 else np.dtype(np.uint8)
    step = starts[1] - starts[0] if len(starts) > 1 else 0
    if step <= 0 or starts != list(range(starts[0], starts[-1] + 1, step)):
        return [np.ndarray(shape[1:], dtype, memory, start) for start in starts]
    inner = np.ndarray(shape[1:], dtype, memory, starts[0])
    return np.ndarray(shape, dtype, memory, starts[0], (step, *inner.strides))
