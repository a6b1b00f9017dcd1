"""The engine's KV in host memory as bytes: a block is copied between all its layers and one payload by a single call, or layer by layer.

Copies run outside the GIL, straight between vLLM's tensors and the pool's arena.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvpool.connectors.vllm.layout import Layers, even, layers_of
from kvpool.transport.reach import Bytes


class Out(Protocol):
    """Some of the engine's blocks on their way out, one call each, in any thread."""

    def read(self, j: int, payload: Bytes) -> None:
        """Copy the j-th block into `payload`."""
        ...


class In(Protocol):
    """Some of the engine's blocks about to be filled, one call each, in one thread at a time."""

    def write(self, j: int, payload: Bytes) -> None:
        """Copy `payload` into the j-th block, now or by `settle`."""
        ...

    def write_layer(self, layer: int, j: int, part: Bytes) -> None:
        """The same with one layer of it."""
        ...

    def settle(self) -> None:
        """Return when all that was written is in place."""
        ...


class Pages(Protocol):
    """All blocks of one rank."""

    layers: Layers

    def out(self, block_ids: Sequence[int]) -> Out:
        """Blocks as this step leaves them. Called by the engine's thread."""
        ...

    def into(self, block_ids: Sequence[int]) -> In:
        """Blocks that this step's work, so far queued, has no more use for. Called by the engine's thread."""
        ...


class HostPages:
    """`Pages` over CPU tensors by layer name, `blocks` blocks each. Raises `ConfigError` for a layout that can't be stored."""

    def __init__(self, tensors: Mapping[str, Any], blocks: int) -> None:
        self.layers = layers_of(tensors, blocks)
        memory = {tensor.untyped_storage().data_ptr(): _bytes(tensor) for tensor in tensors.values()}
        planes = [(at, plane) for at, some in zip(self.layers.storages, self.layers.planes, strict=True) for plane in some]
        views = [_rows(memory[at], plane.start, (plane.blocks, plane.nbytes), (plane.step, 1)) for at, plane in planes]
        self._planes = views
        self._of_layer = np.cumsum([0, *(len(some) for some in self.layers.planes)]).tolist()
        self._ends = np.cumsum([0, *(plane.nbytes for _, plane in planes)]).tolist()
        regular = even(plane for _, plane in planes) if len(set(self.layers.storages)) == 1 else None
        self._whole: Bytes | None = None
        if regular is not None:
            first, distance, count = regular
            shape, strides = (first.blocks, count, first.nbytes), (first.step, distance, 1)
            self._whole = _rows(memory[planes[0][0]], first.start, shape, strides)

    def read(self, block: int, payload: Bytes) -> None:
        """Copy block `block` of all layers into `payload`."""
        if self._whole is not None:
            np.copyto(payload.reshape(self._whole.shape[1:]), self._whole[block])
            return
        for k, plane in enumerate(self._planes):
            np.copyto(payload[self._ends[k] : self._ends[k + 1]], plane[block])

    def write(self, block: int, payload: Bytes) -> None:
        """Copy `payload` into block `block` of all layers."""
        if self._whole is not None:
            np.copyto(self._whole[block], payload.reshape(self._whole.shape[1:]))
            return
        for k, plane in enumerate(self._planes):
            np.copyto(plane[block], payload[self._ends[k] : self._ends[k + 1]])

    def write_layer(self, layer: int, block: int, part: Bytes) -> None:
        """Copy `part` into block `block` of one layer."""
        at = 0
        for plane in self._planes[self._of_layer[layer] : self._of_layer[layer + 1]]:
            np.copyto(plane[block], part[at : at + plane.shape[1]])
            at += plane.shape[1]

    def out(self, block_ids: Sequence[int]) -> "HostBlocks":
        """See `Pages`: the step's work is done when vLLM asks on a CPU."""
        return HostBlocks(self, block_ids)

    def into(self, block_ids: Sequence[int]) -> "HostBlocks":
        """See `Pages`."""
        return HostBlocks(self, block_ids)


class HostBlocks:
    """`Out` and `In` over some blocks of `pages`."""

    def __init__(self, pages: HostPages, block_ids: Sequence[int]) -> None:
        self._pages = pages
        self._ids = block_ids

    def read(self, j: int, payload: Bytes) -> None:
        """See `Out`."""
        self._pages.read(self._ids[j], payload)

    def write(self, j: int, payload: Bytes) -> None:
        """See `In`."""
        self._pages.write(self._ids[j], payload)

    def write_layer(self, layer: int, j: int, part: Bytes) -> None:
        """See `In`."""
        self._pages.write_layer(layer, self._ids[j], part)

    def settle(self) -> None:
        """Nothing is under way."""


def _bytes(tensor: Any) -> Bytes:
    """The whole storage of a CPU tensor."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    array: Bytes = whole.numpy()
    return array


def _rows(memory: Bytes, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    return np.ndarray(shape, np.uint8, memory, start, strides)
