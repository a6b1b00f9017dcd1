"""Whose blocks these are: everything that shapes the bytes of vLLM's KV, in the namespace that all keys begin with.

vLLM's block hashes cover tokens and what is said with a request (LoRA, media, salt), and nothing of the engine. So the rest is here: model,
weights, dtypes, quantisation, sizes, parallel layout, attention backend, what the CPU's instructions make of a block, vLLM's version.
Any difference is another namespace, hence a miss.

A block's bytes are the engine's own: how its attention backend packs K and V is not looked into. So a layer is described as one run of
bytes per token (kind "mla": one latent), in the order in which vLLM registers its tensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvpool.block import Geometry, LayerSpec, Namespace
from kvpool.block.geometry import MAX_BLOCK_TOKENS
from kvpool.block.layers import MAX_LAYERS
from kvpool.errors import ConfigError

FORMAT = "kvpool-vllm-1"
"""Changes when the same engine's blocks are stored otherwise."""
_ITEM_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share of the KV: number `rank` of `size`, in the order (pipeline, tensor). Ranks that hold the same bytes share a part."""

    rank: int = 0
    size: int = 1


def geometry_of(layer_bytes: Sequence[int], block_tokens: int) -> Geometry:
    """The geometry of blocks of which each layer takes `layer_bytes[i]` bytes. Raises `ConfigError`."""
    if not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ConfigError(
            f"blocks of {block_tokens} tokens are too long for the pool: start vLLM with --block-size {MAX_BLOCK_TOKENS} or less"
        )
    if not 1 <= len(layer_bytes) <= MAX_LAYERS:
        raise ConfigError(f"the model registers {len(layer_bytes)} KV tensors, between 1 and {MAX_LAYERS} can be stored")
    unit = _ITEM_BYTES * block_tokens
    for number, nbytes in enumerate(layer_bytes):
        if nbytes % unit or not 0 < nbytes // unit <= 0xFFFF:
            raise ConfigError(
                f"layer {number} takes {nbytes} bytes a block of {block_tokens} tokens, which is not so many 2-byte elements a token"
            )
    return Geometry(tuple(LayerSpec("mla", 1, nbytes // unit, 0) for nbytes in layer_bytes), block_tokens, "bfloat16")


def namespace_of(
    facts: Mapping[str, str], *, weights: bytes, layer_bytes: Sequence[int], block_tokens: int, part: Part, salt: bytes = b""
) -> Namespace:
    """The namespace of one rank. `facts`: whatever else tells engines apart whose KV differs, by name."""
    return Namespace(
        model=FORMAT,
        revision=json.dumps(dict(facts), sort_keys=True, separators=(",", ":")),
        weights_digest=weights,
        geometry=geometry_of(layer_bytes, block_tokens),
        rope="in revision",
        part_rank=part.rank,
        part_size=part.size,
        salt=salt,
    )
