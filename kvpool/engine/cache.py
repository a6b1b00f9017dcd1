"""The KV of one sequence by itself: a `KvStore` whose blocks lie in order. For checks, warm-up, and comparisons without an engine."""

from collections.abc import Sequence

import torch

from kvpool.block import Geometry
from kvpool.engine.device.place import make_store
from kvpool.engine.device.streams import Device
from kvpool.engine.paged.attention import Segment
from kvpool.engine.paged.store import Bytes
from kvpool.errors import ConfigError


class SequenceCache:
    """KV of up to `limit` tokens, of which `length` are valid; `capacity` of them are wanted at first. Not for two writers at a time."""

    def __init__(self, geometry: Geometry, *, capacity: int, limit: int, device: Device | None = None) -> None:
        if not 1 <= capacity <= limit:
            raise ConfigError(f"a sequence's capacity must be between 1 and its limit of {limit} tokens, got {capacity}")
        self.geometry = geometry
        self.limit = limit
        self.length = 0
        self.store = make_store(geometry, -(-limit // geometry.block_tokens), device)

    @property
    def data(self) -> torch.Tensor:
        """A copy of the valid part, ``[layers, 2, kv_heads, length, head_dim]``, where K and V are of one width."""
        return torch.stack(self.arrays(), 1)

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The valid keys and values, ``[layers, kv_heads, length, dim]`` each; views."""
        return self.store.keys[:, :, : self.length], self.store.values[:, :, : self.length]

    def segment(self, tokens: Sequence[int], *, scores: bool) -> Segment:
        """`tokens` as the next ones. Raises `ConfigError` beyond the limit."""
        if self.length + len(tokens) > self.limit:
            raise ConfigError(f"this sequence is limited to {self.limit} tokens, {self.length + len(tokens)} were asked for")
        return Segment(blocks=range(self.store.blocks), start=self.length, tokens=tokens, scores=scores)

    def advance(self, tokens: int) -> None:
        """`tokens` more have been written behind the valid ones, by a forward pass or by `write_block`."""
        if not 0 <= tokens <= self.limit - self.length:
            raise ConfigError(f"can't advance by {tokens} tokens: {self.length} of {self.limit} are valid")
        self.length += tokens

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` of the valid ones."""
        if not 0 <= tokens <= self.length:
            raise ConfigError(f"can't truncate {self.length} tokens to {tokens}")
        self.length = tokens

    def poison(self) -> None:
        """Fill everything behind the valid tokens with NaN, so that whatever stays unwritten shows."""
        for array in (self.store.keys, self.store.values):
            array[:, :, self.length :] = torch.nan

    def copy_block(self, index: int, n_tokens: int, into: Bytes) -> None:
        """Copy the payload of block `index`, of which `n_tokens` are valid, to `into` (its exact size, contiguous)."""
        if index * self.geometry.block_tokens + n_tokens > self.length:
            raise ConfigError(f"block {index} with {n_tokens} tokens is not complete: {self.length} tokens are valid")
        self.store.copy_block(index, n_tokens, into)

    def write_block(self, index: int, n_tokens: int, payload: Bytes) -> None:
        """Copy `payload` into the place of block `index`, for which there must be room. Call `advance` when it counts."""
        if index * self.geometry.block_tokens + n_tokens > self.limit:
            raise ConfigError(f"block {index} with {n_tokens} tokens has no room: the limit is {self.limit} tokens")
        self.store.write_block(index, n_tokens, payload)
