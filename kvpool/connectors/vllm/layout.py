"""Where a block lies in the tensors that vLLM registers: in each, one run of bytes or a few, at a fixed distance from block to block.

A tensor's shape depends on the attention backend (`[blocks, heads, tokens, 2 x dim]`, `[2, blocks, tokens, heads, dim]`, ...), and its
strides may be those of another order. Only one thing is needed: the dimension that counts blocks. What lies inside must be without holes;
what lies outside (K apart from V) makes more runs. A backend may split vLLM's blocks into smaller ones: then several follow each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from kvpool.errors import ConfigError


class Plane(NamedTuple):
    """Run b of `blocks` begins at byte `start + b * step` of its storage and takes `nbytes`."""

    start: int
    step: int
    nbytes: int
    blocks: int


def planes_of(shape: Sequence[int], strides: Sequence[int], itemsize: int, offset: int, blocks: int) -> list[Plane]:
    """The planes of a tensor of `blocks` blocks; strides and offset in elements. Raises `ConfigError` for one that has none."""
    for axis, size in enumerate(shape):
        if size == 0 or size % blocks:
            continue
        found = _along(axis, shape, strides, itemsize, offset, blocks)
        if found is not None:
            return found
    raise ConfigError(
        f"a KV tensor of shape {list(shape)} and strides {list(strides)} doesn't hold {blocks} blocks one after the other; "
        "this attention backend's layout can't be stored: choose another with --attention-backend"
    )


def _along(axis: int, shape: Sequence[int], strides: Sequence[int], itemsize: int, offset: int, blocks: int) -> list[Plane] | None:
    split = shape[axis] // blocks
    step = strides[axis] * split
    others = [(strides[at], shape[at]) for at in range(len(shape)) if at != axis and shape[at] > 1]
    inner = [(stride, size) for stride, size in others if stride < strides[axis]]
    outer = [(stride, size) for stride, size in others if stride >= strides[axis]]
    extent = 1
    for stride, size in sorted(inner):
        if stride != extent:
            return None
        extent *= size
    if extent > strides[axis] or (split > 1 and extent != strides[axis]):
        return None
    origins = sorted(sum(part) for part in product(*([stride * k for k in range(size)] for stride, size in outer)))
    return [Plane((offset + origin) * itemsize, step * itemsize, extent * split * itemsize, blocks) for origin in origins]


class Layers(NamedTuple):
    """All tensors of one rank, each storage once: `planes[layer]` are the runs of one layer, in storage `storages[layer]`."""

    names: list[str]
    storages: list[int]
    planes: list[list[Plane]]

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes a block takes in each layer."""
        return [sum(plane.nbytes for plane in planes) for planes in self.planes]


def layers_of(tensors: Mapping[str, Any], blocks: int) -> Layers:
    """The layers of `tensors` (torch tensors by layer name), in order. Layers that share a tensor count once. Raises `ConfigError`."""
    found, seen = Layers([], [], []), set[tuple[int, int]]()
    for name, tensor in tensors.items():
        if not hasattr(tensor, "untyped_storage"):
            raise ConfigError(f"layer {name} keeps more than one tensor ({type(tensor).__name__}): recurrent state can't be stored")
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset() * tensor.element_size()
        if place in seen:
            continue
        seen.add(place)
        found.names.append(name)
        found.storages.append(place[0])
        found.planes.append(planes_of(tensor.shape, tensor.stride(), tensor.element_size(), tensor.storage_offset(), blocks))
    return found


def even(planes: Iterable[Plane]) -> tuple[Plane, int, int] | None:
    """(first plane, distance, how many) of planes that are alike and lie at equal distances; None where they don't."""
    every = list(planes)
    distance = every[1].start - every[0].start if len(every) > 1 else every[0].nbytes
    alike = all(one[1:] == every[0][1:] and one.start == every[0].start + k * distance for k, one in enumerate(every))
    return (every[0], distance, len(every)) if alike and distance > 0 else None
