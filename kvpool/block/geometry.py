"""How many bytes a block takes and where each layer's K and V lie in it.

Theory. A block holds `block_tokens` tokens of all layers. Its payload is *layer-major*: for each layer K, then V, each one
contiguous ``[kv_heads, n_tokens, dim]`` array; an MLA layer is one contiguous latent ``[n_tokens, k_dim]``; a layer of kind
"none" takes no bytes. So a uniform model's payload is one C-contiguous array ``[layers, 2, kv_heads, n_tokens, head_dim]``,
and one layer of any model is one contiguous range. A partial block (`n_tokens < block_tokens`) is laid out the same way
with its own `n_tokens`: it is packed, not padded.

Tensor parallelism: a worker of part r of n stores `geometry.part(r, n)`. KV heads are split evenly; when there are fewer
heads than parts each is replicated; an MLA latent is replicated on all parts.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvpool.block.layers import MAX_LAYERS, LayerSpec, check_int
from kvpool.errors import ConfigError

MAX_BLOCK_TOKENS = 512
MAX_PAYLOAD_BYTES = (1 << 32) - (1 << 16)
"""A frame (header and payload) must fit in an unsigned 32-bit length."""

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
DTYPE_CODES: dict[str, int] = {"float32": 1, "bfloat16": 2, "float16": 3, "uint8": 4}
LAYOUT_LAYER_MAJOR = 1


class Segment(NamedTuple):
    """One contiguous array inside a payload: bytes ``offset : offset + length``, of `shape` elements."""

    layer: int
    part: Literal["K", "V"]
    offset: int
    length: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of the blocks of one model (or of one tensor-parallel part of it).

    `layers` in model order, `block_tokens` 1..512, `dtype` of the stored elements: "float32", "bfloat16", "float16", or "uint8"
    for bytes that only their owner understands. Raises `ConfigError` for anything else, and when a full block would not fit in a
    32-bit length.
    """

    layers: tuple[LayerSpec, ...]
    block_tokens: int
    dtype: str
    bytes_per_token: int = field(init=False, repr=False, compare=False)
    """Bytes one token takes in all layers together."""

    def __post_init__(self) -> None:
        if not isinstance(self.layers, tuple) or not all(isinstance(spec, LayerSpec) for spec in self.layers):
            raise ConfigError("layers must be a tuple of LayerSpec, one per layer of the model")
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ConfigError(f"a model has between 1 and {MAX_LAYERS} layers, got {len(self.layers)}")
        check_int("block_tokens", self.block_tokens, 1, MAX_BLOCK_TOKENS)
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        elements = sum(spec.elements_per_token for spec in self.layers)
        if elements == 0:
            raise ConfigError('all layers are of kind "none": there is nothing to store')
        object.__setattr__(self, "bytes_per_token", elements * DTYPE_BYTES[self.dtype])
        if self.bytes_per_token * self.block_tokens > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"a block of {self.block_tokens} tokens takes {self.bytes_per_token * self.block_tokens} bytes, more than "
                f"{MAX_PAYLOAD_BYTES}; choose block_tokens of at most {MAX_PAYLOAD_BYTES // self.bytes_per_token}"
            )

    @classmethod
    def uniform(cls, *, layers: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: str) -> "Geometry":
        """Geometry of a model whose `layers` layers are all full attention with equal heads (MHA, GQA or MQA)."""
        check_int("layers", layers, 1, MAX_LAYERS)
        return cls((LayerSpec("full", kv_heads, head_dim, head_dim),) * layers, block_tokens, dtype)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]

    def payload_bytes(self, n_tokens: int) -> int:
        """Bytes of a payload of `n_tokens` tokens, 1..block_tokens."""
        if not 1 <= n_tokens <= self.block_tokens:
            raise ConfigError(f"a block holds 1 to {self.block_tokens} tokens, got {n_tokens}")
        return n_tokens * self.bytes_per_token

    def segments(self, n_tokens: int) -> tuple[Segment, ...]:
        """Where each layer's K and V lie in a payload of `n_tokens` tokens; in order, without holes."""
        self.payload_bytes(n_tokens)
        found: list[Segment] = []
        offset = 0
        for index, spec in enumerate(self.layers):
            arrays: tuple[tuple[Literal["K", "V"], int], ...] = (("K", spec.k_dim), ("V", spec.v_dim))
            for part, dim in arrays:
                if dim == 0:
                    continue
                shape = (n_tokens, dim) if spec.kind == "mla" else (spec.kv_heads, n_tokens, dim)
                length = spec.kv_heads * n_tokens * dim * self.itemsize
                found.append(Segment(index, part, offset, length, shape))
                offset += length
        return tuple(found)

    def uniform_shape(self, n_tokens: int) -> tuple[int, int, int, int, int] | None:
        """``(layers, 2, kv_heads, n_tokens, head_dim)`` when one array holds the payload; None for mixed layers or MLA."""
        self.payload_bytes(n_tokens)
        first = self.layers[0]
        alike = all((s.kv_heads, s.k_dim, s.v_dim) == (first.kv_heads, first.k_dim, first.k_dim) for s in self.layers)
        return (len(self.layers), 2, first.kv_heads, n_tokens, first.k_dim) if alike and first.kind != "none" else None

    def part(self, rank: int, size: int) -> "Geometry":
        """The geometry of tensor-parallel part `rank` of `size`; `ConfigError` when the heads can't be shared evenly."""
        check_int("part size", size, 1, 0xFFFF)
        check_int("part rank", rank, 0, size - 1)
        return Geometry(tuple(spec.part(rank, size) for spec in self.layers), self.block_tokens, self.dtype)
