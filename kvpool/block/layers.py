"""What one layer of a model stores per token, and how a list of layers is spelled in bytes.

Theory. Models differ in how many key/value heads a layer keeps (MHA, GQA, MQA), in whether it keeps one latent instead
(MLA), in whether it only looks back a window, and hybrids have layers that keep nothing. `LayerSpec` says that for one
layer. A model's list is run-length coded, because nearly all models repeat one or two specs: each run is 14 bytes,
little-endian ``u16 count, u16 kind, u16 kv_heads, u16 k_dim, u16 v_dim, u32 window``. Runs are maximal, so equal lists
have equal bytes; the same bytes serve the namespace (identity) and the frame header (storage).
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from kvpool.errors import ConfigError

LayerKind = Literal["full", "window", "mla", "none"]

MAX_LAYERS = 1024
KIND_CODES: dict[str, int] = {"full": 1, "window": 2, "mla": 3, "none": 4}
_KINDS: dict[int, LayerKind] = {1: "full", 2: "window", 3: "mla", 4: "none"}
_RUN = struct.Struct("<HHHHHI")
_U16, _U32 = 0xFFFF, 0xFFFFFFFF


def check_int(name: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an int in `low..high`; raise `ConfigError` naming it otherwise."""
    if type(value) is not int:
        raise ConfigError(f"{name} must be an int, got {type(value).__name__}; convert it with int()")
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {value}")
    return value


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Shape of one layer's cache; dimensions are in elements.

    * ``full``: `kv_heads` heads of `k_dim` (K) and `v_dim` (V) elements per token.
    * ``window``: the same, of which only the last `window` tokens are ever read.
    * ``mla``: one latent of `k_dim` = d_c + d_rope elements per token; `kv_heads` is 1 and `v_dim` is 0.
    * ``none``: the layer keeps nothing per token; everything is 0.
    """

    kind: LayerKind
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KIND_CODES:
            raise ConfigError(f"layer kind must be one of {', '.join(KIND_CODES)}, got {self.kind!r}")
        if self.kind == "none":
            if (self.kv_heads, self.k_dim, self.v_dim, self.window) != (0, 0, 0, 0):
                raise ConfigError('a layer of kind "none" stores nothing; write LayerSpec("none", 0, 0, 0)')
            return
        check_int("kv_heads", self.kv_heads, 1, _U16)
        check_int("k_dim", self.k_dim, 1, _U16)
        if self.kind == "mla":
            if self.kv_heads != 1 or self.v_dim != 0:
                raise ConfigError('an "mla" layer stores one latent; write LayerSpec("mla", 1, d_c + d_rope, 0)')
        else:
            check_int("v_dim", self.v_dim, 1, _U16)
        if self.kind == "window":
            check_int("window", self.window, 1, _U32)
        elif self.window != 0:
            raise ConfigError(f'a {self.kind!r} layer has no window; drop window={self.window} or use kind "window"')

    @property
    def elements_per_token(self) -> int:
        """Elements stored per token, K and V together."""
        return self.kv_heads * (self.k_dim + self.v_dim)

    def heads_of_part(self, rank: int, size: int) -> range:
        """Which of this layer's KV heads tensor-parallel part `rank` of `size` stores.

        Heads are split evenly; with fewer heads than parts each head is replicated on `size / kv_heads` neighbouring
        parts. A latent (``mla``) is replicated on all parts. Raises `ConfigError` when neither division is even.
        """
        check_int("part size", size, 1, _U16)
        check_int("part rank", rank, 0, size - 1)
        heads = self.kv_heads
        if self.kind in ("mla", "none"):
            return range(heads)
        if heads % size == 0:
            share = heads // size
            return range(rank * share, (rank + 1) * share)
        if heads < size and size % heads == 0:
            head = rank // (size // heads)
            return range(head, head + 1)
        raise ConfigError(
            f"{heads} KV heads can't be shared by {size} tensor-parallel parts; "
            f"choose a part size that divides {heads} or is a multiple of it"
        )

    def part(self, rank: int, size: int) -> "LayerSpec":
        """The spec of what part `rank` of `size` stores of this layer."""
        return LayerSpec(self.kind, len(self.heads_of_part(rank, size)), self.k_dim, self.v_dim, self.window)


def pack_layers(layers: Iterable[LayerSpec]) -> bytes:
    """Run-length coded bytes of a list of layers; equal lists give equal bytes."""
    runs = ((len(list(run)), spec) for spec, run in groupby(layers))
    return b"".join(_RUN.pack(count, KIND_CODES[s.kind], s.kv_heads, s.k_dim, s.v_dim, s.window) for count, s in runs)


def unpack_layers(data: bytes) -> tuple[LayerSpec, ...]:
    """The list that `pack_layers` coded; the count is checked before anything is built. Raises `ConfigError`."""
    if not data or len(data) % _RUN.size:
        raise ConfigError(f"a list of layers takes a positive multiple of {_RUN.size} bytes, got {len(data)}")
    runs = list(_RUN.iter_unpack(data))
    total = sum(run[0] for run in runs)
    if total > MAX_LAYERS or not all(run[0] for run in runs):
        raise ConfigError(f"a list of layers has runs of at least one and at most {MAX_LAYERS} layers, got {total}")
    layers: list[LayerSpec] = []
    for count, kind, kv_heads, k_dim, v_dim, window in runs:
        if kind not in _KINDS:
            raise ConfigError(f"unknown layer kind {kind}")
        spec = LayerSpec(_KINDS[kind], kv_heads, k_dim, v_dim, window)
        if layers and layers[-1] == spec:
            raise ConfigError("two neighbouring runs of layers are equal; they must be one run")
        layers.extend([spec] * count)
    return tuple(layers)
