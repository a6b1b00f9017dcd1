"""Callers' arrays as bytes: numpy arrays and torch tensors in, views without a copy out. torch is never imported from here."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, Geometry
from kvpool.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

_BYTES = np.dtype(np.uint8)
_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "uint8": _BYTES,
}
"""numpy has no bfloat16: its bits travel as uint16."""


def blocks_shape(geometry: Geometry, n_blocks: int) -> tuple[int, ...]:
    """`[n, layers, 2, kv_heads, block_tokens, head_dim]` where all layers are alike, else `[n, payload bytes]` (of uint8)."""
    shape = geometry.uniform_shape(geometry.block_tokens)
    return (n_blocks, *shape) if shape is not None else (n_blocks, geometry.payload_bytes(geometry.block_tokens))


def element_type(geometry: Geometry) -> "np.dtype[Any]":
    """numpy's type of the elements of a block."""
    return _NUMPY_DTYPES[geometry.dtype]


def new_blocks(geometry: Geometry, n_blocks: int) -> npt.NDArray[Any]:
    """An empty numpy array for `n_blocks` full blocks."""
    shape = blocks_shape(geometry, n_blocks)
    return np.empty(shape, _BYTES if len(shape) == 2 else _NUMPY_DTYPES[geometry.dtype])


def as_rows(blocks: Any, geometry: Geometry, *, writable: bool) -> Bytes:
    """`blocks` (numpy array or CPU torch tensor, contiguous) as uint8 `[n, payload bytes]` over the same memory.

    Raises `ConfigError` when the dtype, the size or the memory layout doesn't fit the geometry.
    """
    row = geometry.payload_bytes(geometry.block_tokens)
    if type(blocks) is np.ndarray and blocks.dtype == _BYTES and blocks.ndim == 2 and blocks.shape[1] == row:
        flags = blocks.flags
        if flags.c_contiguous and (flags.writeable or not writable):
            return blocks
    array = _numpy_of(blocks, geometry)
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"blocks must be a numpy array or a torch tensor, got {type(blocks).__name__}")
    if not array.flags.c_contiguous:
        raise ConfigError("blocks must be contiguous in memory; pass numpy.ascontiguousarray(x) or x.contiguous()")
    if writable and not array.flags.writeable:
        raise ConfigError("the array to read into is read-only")
    expected = _NUMPY_DTYPES[geometry.dtype]
    if array.dtype != expected and array.dtype != _BYTES:
        raise ConfigError(f"blocks of this pool are {geometry.dtype}, got {array.dtype}; pool blocks are stored as they are computed")
    if array.nbytes % row or (array.ndim and array.shape[0] * row != array.nbytes):
        wanted = blocks_shape(geometry, 1)[1:]
        raise ConfigError(f"blocks must have shape [n, {', '.join(map(str, wanted))}] ({row} bytes each), got {list(array.shape)}")
    return array.reshape(-1).view(np.uint8).reshape(-1, row)


def rows_of(chain: Sequence[BlockKey], blocks: Any, geometry: Geometry) -> Bytes:
    """`as_rows` of the blocks that `chain` names, one each. Raises `ConfigError` for another number of them, too."""
    rows = as_rows(blocks, geometry, writable=False)
    if len(rows) != len(chain):
        raise ConfigError(f"the tokens make {len(chain)} blocks of {geometry.block_tokens}, but {len(rows)} were given")
    return rows


def bytes_of(buffer: Any, *, writable: bool) -> Bytes:
    """A buffer's bytes, uint8 `[n]` over the same memory: of anything with a contiguous buffer, numpy array or CPU torch tensor.

    Raises `ConfigError` for another thing, and with `writable` for one that is read-only.
    """
    if type(buffer) is np.ndarray and buffer.dtype == _BYTES and buffer.ndim == 1:
        flags = buffer.flags
        if flags.c_contiguous and (flags.writeable or not writable):
            return buffer
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(buffer, torch.Tensor):
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise ConfigError(f"a tensor must be contiguous and on the CPU, this one is on {buffer.device}, strides {buffer.stride()}")
        buffer = buffer.detach().reshape(-1).view(torch.uint8).numpy()
    try:
        view = memoryview(buffer)
        array: Bytes = np.frombuffer(view, _BYTES) if view.c_contiguous and view.nbytes else np.empty(0, _BYTES)
    except (TypeError, ValueError, BufferError) as error:
        raise ConfigError(f"a buffer is bytes, a memoryview, a numpy array or a CPU tensor: {error}") from None
    if not view.c_contiguous:
        raise ConfigError("a buffer must be contiguous in memory; copy it first")
    if writable and view.readonly:
        raise ConfigError("the buffer to read into is read-only")
    return array


def _numpy_of(blocks: Any, geometry: Geometry) -> Any:
    """A torch tensor as numpy over the same memory; anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(blocks, torch.Tensor):
        return blocks
    if blocks.device.type != "cpu":
        way = "use Client, which takes CUDA tensors, or " if blocks.is_cuda else ""
        raise ConfigError(f"blocks are on {blocks.device}; {way}copy them to the host first with x.cpu()")
    if str(blocks.dtype) != f"torch.{geometry.dtype}" and blocks.dtype is not torch.uint8:
        raise ConfigError(f"blocks of this pool are {geometry.dtype}, got {blocks.dtype}; pool blocks are stored as they are computed")
    plain = blocks.detach()
    return (plain.view(torch.uint16) if plain.dtype is torch.bfloat16 else plain).numpy()
