"""The KV of one sequence: one preallocated array that `transformers` fills in place and the pool copies blocks to and from.

Theory. The array is ``[layers, 2, kv_heads, capacity, head_dim]``, so the tokens of a block are a slice of it and a block's
payload ``[layers, 2, kv_heads, n, head_dim]`` is one strided copy, without the GIL. A forward pass sees it as the `Cache` of
transformers: each layer writes its new keys and values behind the valid `length` and gets a view of everything up to
there; `length` itself moves only when the whole pass is done, so a pass that fails leaves the sequence as it was. The
array grows by doubling up to `limit`. Full blocks never change, and growing copies before it swaps, so another thread may
copy finished blocks out while the next tokens are computed.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpool.block import Geometry
from kvpool.errors import ConfigError

Bytes = npt.NDArray[np.uint8]
_ALIGNMENT = 64
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SequenceCache:
    """KV of up to `limit` tokens for a model whose `geometry` is uniform; room for `capacity` of them is taken at once.

    `length` tokens are valid. Not for two writers at a time.
    """

    def __init__(self, geometry: Geometry, *, capacity: int, limit: int) -> None:
        shape = geometry.uniform_shape(1)
        if shape is None:
            raise ConfigError("this engine keeps KV of models whose layers are all alike; this geometry mixes layers")
        if not 1 <= capacity <= limit:
            raise ConfigError(f"a sequence's capacity must be between 1 and its limit of {limit} tokens, got {capacity}")
        self.geometry = geometry
        self.limit = limit
        self._held = _Held(_allocate(geometry, capacity))
        self.view: Any = Cache(layers=[_Layer(self._held, i) for i in range(shape[0])])

    @property
    def length(self) -> int:
        """Valid tokens."""
        return self._held.length

    @property
    def capacity(self) -> int:
        """Tokens there is room for without growing."""
        return self._held.data.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes taken, valid or not."""
        return self.capacity * self.geometry.bytes_per_token

    @property
    def data(self) -> torch.Tensor:
        """The valid part, ``[layers, 2, kv_heads, length, head_dim]``; a view."""
        return self._held.data[:, :, :, : self.length]

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in all, at least doubling when that takes more memory. Raises `ConfigError` beyond `limit`."""
        if tokens > self.limit:
            raise ConfigError(f"this sequence is limited to {self.limit} tokens, {tokens} were asked for")
        if tokens > self.capacity:
            self._move(min(self.limit, max(tokens, 2 * self.capacity)))

    def fit(self, *, capacity: int, limit: int) -> None:
        """Take a new `limit` and make room for `capacity` tokens, giving back what is beyond the limit."""
        if not self.length <= capacity <= limit:
            raise ConfigError(f"can't fit {self.length} tokens into a capacity of {capacity} and a limit of {limit}")
        self.limit = limit
        if capacity > self.capacity or self.capacity > limit:
            self._move(capacity)

    def advance(self, tokens: int) -> None:
        """`tokens` more have been written behind the valid ones, by a forward pass or by `write_block`."""
        if not 0 <= tokens <= self.capacity - self.length:
            raise ConfigError(f"can't advance by {tokens} tokens: {self.length} of {self.capacity} are valid")
        self._held.length += tokens

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of the valid ones."""
        if not 0 <= tokens <= self.length:
            raise ConfigError(f"can't truncate {self.length} tokens to {tokens}")
        self._held.length = tokens

    def poison(self) -> None:
        """Fill everything behind the valid tokens with NaN, so that whatever stays unwritten shows."""
        self._held.data[:, :, :, self.length :] = torch.nan

    def read_block(self, index: int, n_tokens: int) -> Bytes:
        """A copy of the payload of block `index`, of which `n_tokens` are valid."""
        payload = np.empty(self.geometry.payload_bytes(n_tokens), np.uint8)
        self.copy_block(index, n_tokens, payload)
        return payload

    def copy_block(self, index: int, n_tokens: int, into: Bytes) -> None:
        """Copy the payload of block `index` to `into` (its exact size, contiguous)."""
        if index * self.geometry.block_tokens + n_tokens > self.length:
            raise ConfigError(f"block {index} with {n_tokens} tokens is not complete: {self.length} tokens are valid")
        part = self._block(index, n_tokens)
        if not into.flags.c_contiguous:
            raise ConfigError("a block is copied into contiguous memory only")
        np.copyto(into.reshape(part.shape), part)

    def write_block(self, index: int, n_tokens: int, payload: Bytes) -> None:
        """Copy `payload` into the place of block `index`, for which there must be room. Call `advance` when it counts."""
        if index * self.geometry.block_tokens + n_tokens > self.capacity:
            raise ConfigError(f"block {index} with {n_tokens} tokens has no room: capacity is {self.capacity} tokens")
        part = self._block(index, n_tokens)
        np.copyto(part, payload.reshape(part.shape))

    def _move(self, capacity: int) -> None:
        moved = _allocate(self.geometry, capacity)
        moved[:, :, :, : self.length] = self.data
        self._held.data = moved

    def _block(self, index: int, n_tokens: int) -> Bytes:
        """The bytes of a block in place: ``[layers, 2, kv_heads, n_tokens, head_dim * itemsize]``, a view."""
        self.geometry.payload_bytes(n_tokens)  # refuses counts a block can't hold
        start = index * self.geometry.block_tokens
        array: Bytes = self._held.data.view(torch.uint8).numpy()
        return array[:, :, :, start : start + n_tokens]


class _Held:
    """What the layers share. They don't point back at the sequence: a circle would keep its memory until a collection."""

    __slots__ = ("data", "length")

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.length = 0


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer's keys and values, as `transformers` wants to see them."""

    is_sliding = False

    def __init__(self, held: _Held, index: int) -> None:
        super().__init__()
        self._held = held
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the array is there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[1, kv_heads, q, head_dim]`` keys and values; all of them so far, as views of the same form."""
        data, start = self._held.data, self._held.length
        end = start + key_states.shape[2]
        if key_states.shape != (1, data.shape[2], end - start, data.shape[4]) or value_states.shape != key_states.shape:
            raise ConfigError(f"the model caches keys {tuple(key_states.shape)} and values {tuple(value_states.shape)}: not its geometry")
        data[self._index, 0, :, start:end] = key_states[0]
        data[self._index, 1, :, start:end] = value_states[0]
        return data[self._index, 0:1, :, :end], data[self._index, 1:2, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the keys a query of `query_length` tokens sees, and their offset."""
        return self._held.length + query_length, 0

    def get_seq_length(self) -> int:
        """Valid tokens."""
        return self._held.length

    def get_max_length(self) -> int:
        """No limit that transformers should know of."""
        return -1


def _allocate(geometry: Geometry, tokens: int) -> torch.Tensor:
    """Room for `tokens` tokens, uninitialised, at a multiple of 64 bytes.

    By numpy, which asks for huge pages: the first touch of a large array is then about four times quicker than of torch's own.
    """
    layers, two, heads, _, dim = geometry.uniform_shape(1) or (0, 0, 0, 0, 0)
    nbytes = tokens * geometry.bytes_per_token
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    aligned = torch.from_numpy(raw[start : start + nbytes])
    return aligned.view(TORCH_DTYPES[geometry.dtype]).view(layers, two, heads, tokens, dim)
