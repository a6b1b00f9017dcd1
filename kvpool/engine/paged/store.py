"""The bytes of the blocks: arrays that passes write to, attention reads from, and the pool's blocks are copied to and from.

Theory. Keys and values are arrays ``[layers, kv_heads, slots, dim]``; block b is the slots ``b * block_tokens`` and following. So the
payload of a block is two strided copies without the GIL, and blocks that follow each other are one piece of a sequence. What lies in
one piece attention reads in place (`pieces`); the rest it reads through what the *layout* gives it:

    paged       the blocks are gathered into a new array, per layer and pass
    vattention  the pages of the blocks are mapped once more, one behind the other (`windows.py`)

Both read the same bytes in the same order with the same kernel, so both give the same bits. Memory is reserved, not touched, until it is
written to.
"""

import mmap
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvpool.block import Geometry
from kvpool.engine.paged.blocks import Copy
from kvpool.errors import ConfigError
from kvpool.tier.pages import reserve

Bytes = npt.NDArray[np.uint8]
Planes = Sequence[torch.Tensor]
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Piece(NamedTuple):
    """Blocks that lie one behind the other: the first one, and how many."""

    first: int
    length: int


def pieces(blocks: Sequence[int]) -> list[Piece]:
    """`blocks` as runs of neighbours, in order."""
    found: list[Piece] = []
    for block in blocks:
        if found and block == found[-1].first + found[-1].length:
            found[-1] = Piece(found[-1].first, found[-1].length + 1)
        else:
            found.append(Piece(block, 1))
    return found


class KvStore:
    """KV of `blocks` blocks for a model whose layers are all alike (MHA, GQA or MQA; K and V may differ in width). Close it.

    Reserves address space of its own; memory is taken when a block is first written.
    """

    def __init__(self, geometry: Geometry, blocks: int) -> None:
        spec = geometry.layers[0]
        if spec.kind != "full" or any(other != spec for other in geometry.layers):
            raise ConfigError("this engine keeps KV of models whose layers are all alike and attend to everything; this geometry differs")
        self.geometry = geometry
        self.blocks = blocks
        self.gathered_bytes = 0
        """Bytes copied so far because a sequence doesn't lie in one piece."""
        self._arrays = tuple(self._array(len(geometry.layers), spec.kv_heads, dim) for dim in (spec.k_dim, spec.v_dim))
        self.keys, self.values = self._arrays
        """``[layers, kv_heads, slots, dim]``."""

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``[kv_heads, n, dim]`` keys and values of one layer into `slots` ``[n]``."""
        self.keys[layer].index_copy_(1, slots, keys)
        self.values[layer].index_copy_(1, slots, values)

    def read(
        self, layer: int, owner: int | None, blocks: Sequence[int], runs: Sequence[Piece], tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `tokens` keys and values in `blocks`, which are `runs`: two arrays ``[1, kv_heads, tokens, dim]``.

        `owner` names the sequence, for layouts that keep something for it from pass to pass. Layers are read in order.
        """
        if len(runs) == 1:
            start = runs[0].first * self.geometry.block_tokens
            return self.keys[layer : layer + 1, :, start : start + tokens], self.values[layer : layer + 1, :, start : start + tokens]
        return self._joined(layer, owner, blocks, runs, tokens)

    def planes(self, runs: Sequence[Piece], tokens: int) -> tuple[Planes, Planes] | None:
        """What `read` gives of each layer, for a pass in which nothing of it is loaded; None where it doesn't lie in one piece."""
        if len(runs) != 1:
            return None
        slots = slice(start := runs[0].first * self.geometry.block_tokens, start + tokens)
        keys, values = (array[:, None, :, slots].unbind(0) for array in self._arrays)
        return keys, values

    def copy_block(self, block: int, n_tokens: int, into: Bytes) -> None:
        """Copy the payload of the first `n_tokens` tokens of `block` to `into` (its exact size, contiguous)."""
        if not into.flags.c_contiguous:
            raise ConfigError("a block is copied into contiguous memory only")
        for part, place in zip(self._block(block, n_tokens), self._parts(into, n_tokens), strict=True):
            np.copyto(place, part)

    def write_block(self, block: int, n_tokens: int, payload: Bytes, *, first: int = 0) -> None:
        """Copy `payload` into the first `n_tokens` slots of `block`: all of it, or the part that holds the layers from `first` on."""
        for part, source in zip(self._block(block, n_tokens), self._parts(payload, n_tokens), strict=True):
            np.copyto(part[first : first + len(source)], source)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Carry out what the block manager asked for."""
        for source, target, tokens in copies:
            for there, here in zip(self._block(target, tokens), self._block(source, tokens), strict=True):
                np.copyto(there, here)

    def touch(self, tokens: int) -> None:
        """Take the memory of the first blocks, for so many tokens, before somebody waits for it.

        With large pages the first block alone takes one in each layer and head: 360 MB of SmolLM2's.
        """
        last = min(tokens, self.blocks * self.geometry.block_tokens) - 1
        for array in self._arrays:
            array[:, :, [0, last]] = 0

    def passed(self) -> None:
        """A pass over this store has returned, with all that was read and written in it."""

    def close(self) -> None:
        """Let go of the memory, which goes when nobody looks at it any more."""
        self._arrays = self._bytes = ()
        del self.keys, self.values

    @cached_property
    def _bytes(self) -> tuple[Bytes, ...]:
        return tuple(array.view(torch.uint8).numpy() for array in self._arrays)

    def _allocate(self, nbytes: int) -> mmap.mmap:
        raw = reserve(nbytes)
        raw.madvise(mmap.MADV_HUGEPAGE)  # the first touch of small pages takes about four times as long
        return raw

    def _array(self, layers: int, heads: int, dim: int) -> torch.Tensor:
        count = layers * heads * self.blocks * self.geometry.block_tokens * dim
        raw = self._allocate(count * self.geometry.itemsize)
        return torch.frombuffer(raw, dtype=TORCH_DTYPES[self.geometry.dtype], count=count).view(layers, heads, -1, dim)

    def _joined(
        self, layer: int, owner: int | None, blocks: Sequence[int], runs: Sequence[Piece], tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`read` of what lies in several pieces: gather it."""
        index = torch.tensor(blocks, device=self.keys.device)
        keys, values = (self._gather(array[layer], index)[None, :, :tokens] for array in self._arrays)
        return keys, values

    def _gather(self, plane: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        heads, _, dim = plane.shape
        found = plane.view(heads, self.blocks, -1).index_select(1, index).view(heads, -1, dim)
        self.gathered_bytes += found.numel() * found.element_size()
        return found

    def _block(self, block: int, n_tokens: int) -> tuple[Bytes, ...]:
        """The bytes of a block in place, keys and values: ``[layers, kv_heads, n_tokens, dim * itemsize]``, views."""
        slots = self._slots(block, n_tokens)
        return tuple(array[:, :, slots] for array in self._bytes)

    def _slots(self, block: int, n_tokens: int) -> slice:
        """Where the first `n_tokens` tokens of a block lie."""
        self.geometry.payload_bytes(n_tokens)  # refuses counts a block can't hold
        if not 0 <= block < self.blocks:
            raise ConfigError(f"there is no block {block}: the store has {self.blocks}")
        start = block * self.geometry.block_tokens
        return slice(start, start + n_tokens)

    def _parts(self, payload: Bytes, n_tokens: int) -> tuple[Bytes, Bytes]:
        """Keys and values in a payload of whole layers, as `_block` shapes them."""
        spec, itemsize = self.geometry.layers[0], self.geometry.itemsize
        rows = payload.reshape(-1, n_tokens * spec.elements_per_token * itemsize)
        split = n_tokens * spec.kv_heads * spec.k_dim * itemsize
        keys = rows[:, :split].reshape(len(rows), spec.kv_heads, n_tokens, -1)
        return keys, rows[:, split:].reshape(len(rows), spec.kv_heads, n_tokens, -1)
