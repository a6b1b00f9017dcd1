"""vAttention: scattered blocks as one contiguous range of addresses, by mapping their pages a second time.

Theory (vAttention, Prabhu et al. 2025). Kernels want a sequence's keys in one piece; paging wants them anywhere. The memory management
unit can have both: the blocks lie in a file without a name (`memfd`), and a sequence whose blocks are several runs gets a *window*, a
range of addresses to which the pages of its blocks are mapped one run behind the other, once per layer and head, for keys and for
values. A shared prefix is then the same pages in two windows. Attention reads the window in place; nothing is gathered. What lies in one
run anyway needs no window.

Pages can't be cut, so a head's part of a block must be whole pages: ``block_tokens * head_dim * itemsize`` a multiple of `mmap.PAGESIZE`.
The kernel bounds how many mappings a process has (`vm.max_map_count`). So windows that were longest not used go when there are more than
`MAX_MAPS` mappings or `MAX_WINDOWS` sequences, and a sequence in more than `MAX_RUNS` pieces, which takes memory that is nearly full, is
gathered as in the paged layout, and counted there.

This is for CPUs. On a GPU it takes the CUDA driver's virtual memory management, which this build of the engine doesn't have.
"""

import ctypes
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvpool.block import Geometry
from kvpool.engine.paged.store import KvStore, Piece
from kvpool.errors import ConfigError, LocalError
from kvpool.tier.pages import map_over, reserve

MAX_MAPS = 40_000
MAX_WINDOWS = 128
MAX_RUNS = 32
_PROT_NONE = 0


class _Window:
    """Keys or values of one sequence, ``[layers, kv_heads, room * block_tokens, dim]``, mapped from a file of `planes` planes."""

    def __init__(self, file: int, source: torch.Tensor, blocks: int, room: int) -> None:
        layers, heads, slots, dim = source.shape
        self._file = file
        self._planes = layers * heads
        self._part = slots // blocks * dim * source.element_size()
        self._blocks = blocks
        self.room = room
        self._runs: list[Piece] = []
        nbytes = self._planes * room * self._part
        with _telling():
            place = reserve(nbytes, _PROT_NONE)
        self._address = np.frombuffer(place, np.uint8).ctypes.data
        memory = (ctypes.c_char * nbytes).from_address(self._address)
        memory.place = place  # type: ignore[attr-defined]  # unmapped with the last view of it
        self.data = torch.frombuffer(memory, dtype=source.dtype).view(layers, heads, -1, dim)

    @property
    def maps(self) -> int:
        """Mappings it takes."""
        return self._planes * (len(self._runs) + 1)

    def show(self, runs: Sequence[Piece]) -> None:
        """Let the window begin with `runs`; what is the same as before stays."""
        at, moved = 0, False
        for index, run in enumerate(runs):
            moved = moved or index >= len(self._runs) or self._runs[index] != run  # behind a run that changed all lie elsewhere
            if moved:
                self._map(at, run)
            at += run.length
        self._runs = list(runs)

    def _map(self, at: int, run: Piece) -> None:
        with _telling():
            for plane in range(self._planes):
                target = self._address + (plane * self.room + at) * self._part
                source = (plane * self._blocks + run.first) * self._part
                map_over(target, run.length * self._part, mmap.PROT_READ, self._file, source)

    def close(self) -> None:
        """Let go; its pages are unmapped with the last view of them."""
        del self.data


class VirtualKvStore(KvStore):
    """A `KvStore` that maps what is scattered instead of gathering it. Raises `ConfigError` where pages and blocks don't fit."""

    def __init__(self, geometry: Geometry, blocks: int) -> None:
        for dim in sorted({geometry.layers[0].k_dim, geometry.layers[0].v_dim}):
            if rest := geometry.block_tokens * dim * geometry.itemsize % mmap.PAGESIZE:
                raise ConfigError(
                    f"a head's part of a block ends {rest} bytes behind a page of {mmap.PAGESIZE}: choose --block-tokens so that its "
                    f"product with {dim * geometry.itemsize} bytes is a multiple of a page, or --layout paged"
                )
        self.mapped_bytes = 0
        """Bytes read through windows so far, which the paged layout would have gathered."""
        self._files: list[int] = []
        self._windows: OrderedDict[int, tuple[_Window, _Window]] = OrderedDict()  # by owner; the first was longest not used
        super().__init__(geometry, blocks)

    def close(self) -> None:
        """Let go of windows and memory, which go when nobody looks at them any more."""
        while self._windows:
            self._drop(next(iter(self._windows)))
        super().close()
        while self._files:
            os.close(self._files.pop())

    def _allocate(self, nbytes: int) -> mmap.mmap:
        self._files.append(os.memfd_create("kvpool-kv"))
        os.ftruncate(self._files[-1], nbytes)
        return mmap.mmap(self._files[-1], nbytes)

    def _joined(
        self, layer: int, owner: int | None, blocks: Sequence[int], runs: Sequence[Piece], tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if owner is None or len(runs) > MAX_RUNS:
            return super()._joined(layer, owner, blocks, runs, tokens)
        if layer == 0 or owner not in self._windows:  # other sequences of the pass may have needed its room
            self._show(owner, len(blocks), runs)
        self._windows.move_to_end(owner)
        keys, values = (window.data[layer : layer + 1, :, :tokens] for window in self._windows[owner])
        self.mapped_bytes += (keys.numel() + values.numel()) * keys.element_size()
        return keys, values

    def _show(self, owner: int, length: int, runs: Sequence[Piece]) -> None:
        if owner in self._windows and self._windows[owner][0].room < length:
            self._drop(owner)
        if owner not in self._windows:
            keys, values = (_Window(file, array, self.blocks, 2 * length) for file, array in zip(self._files, self._arrays, strict=True))
            self._windows[owner] = keys, values
        for window in self._windows[owner]:
            window.show(runs)
        while len(self._windows) > 1 and (len(self._windows) > MAX_WINDOWS or self._maps() > MAX_MAPS):
            self._drop(next(other for other in self._windows if other != owner))

    def _maps(self) -> int:
        return sum(window.maps for pair in self._windows.values() for window in pair)

    def _drop(self, owner: int) -> None:
        for window in self._windows.pop(owner):
            window.close()


@contextmanager
def _telling() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LocalError(f"can't map a sequence's KV: {error.strerror}; raise vm.max_map_count or choose --layout paged") from error
