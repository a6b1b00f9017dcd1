"""From a model's configuration to the geometry and the namespace of its blocks, or a clear refusal.

A block is valid for every prompt that starts with its prefix only if a token's K and V depend on nothing but the tokens up
to it. That holds for causal decoders with full attention whose rotary positions are absolute and fixed. It does not
hold, or not in the form stored here, for sliding windows (a block is not wholly there), linear attention (another
layout), encoders, and rotary variants that look at the length of the whole input. Of models with latent attention (MLA) the keys and values
that the latent stands for are kept, head by head: right, and as large as without a latent.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from kvpool.block import Geometry, LayerSpec, Namespace
from kvpool.config.models import weights_digest
from kvpool.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
_MIN_CONTEXT = 16
_STABLE_ROPE = ("default", "linear", "llama3", "yarn")
_VOLATILE = {
    "transformers_version", "_name_or_path", "_model_name_or_path", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
}  # fmt: skip
"""Keys of config.json that don't change a token's KV."""


def geometry_of(config: Any, *, dtype: str, block_tokens: int) -> Geometry:
    """The block geometry of a transformers `config`. Raises `ConfigError` for models this engine can't serve."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if reason := unsupported(config):
        raise ConfigError(f"this engine can't serve a {config.model_type!r} model: {reason}; it serves plain causal decoders such as Llama")
    heads = int(config.num_attention_heads)
    if getattr(config, "kv_lora_rank", None):
        spec = LayerSpec("full", heads, int(config.qk_nope_head_dim + config.qk_rope_head_dim), int(config.v_head_dim))
        return Geometry((spec,) * int(config.num_hidden_layers), block_tokens, dtype)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return Geometry.uniform(
        layers=int(config.num_hidden_layers), kv_heads=int(kv_heads), head_dim=int(head_dim), block_tokens=block_tokens, dtype=dtype
    )


def unsupported(config: Any) -> str:
    """Why blocks of a model with `config` can't be shared as plain prefix KV; empty if they can."""

    def have(name: str) -> Any:
        return getattr(config, name, None)

    missing = [n for n in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings") if not have(n)]
    if missing:
        return f"its config lacks {', '.join(missing)}"
    if have("max_position_embeddings") < _MIN_CONTEXT:
        return f"its context of {config.max_position_embeddings} tokens is under {_MIN_CONTEXT}"
    if have("is_encoder_decoder"):
        return "it is an encoder-decoder"
    if have("kv_lora_rank") and not all(have(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")):
        return "its attention keeps a latent (MLA) of a shape its config doesn't give"
    odd = sorted({str(kind) for kind in have("layer_types") or () if kind != "full_attention"})
    if odd:
        return f"it has layers of kind {', '.join(odd)}"
    if have("sliding_window") and getattr(config, "use_sliding_window", True):
        return f"it attends to a sliding window of {config.sliding_window} tokens"
    if have("attention_chunk_size"):
        return f"it attends within chunks of {config.attention_chunk_size} tokens"
    rope = have("rope_parameters")
    if not rope:
        return "it has no rotary position embedding (rope_parameters)"
    kind = rope.get("rope_type", "default")
    if kind not in _STABLE_ROPE:
        return f"its rotary embedding {kind!r} depends on the length of the input"
    return ""


def namespace_of(directory: Path, config: Any, geometry: Geometry) -> Namespace:
    """The namespace of the model in `directory`: its weights and configuration, under no matter what name it is served."""
    try:
        written = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / 'config.json'} can't be read: {error}") from None
    lasting = {name: value for name, value in written.items() if name not in _VOLATILE}
    return Namespace(
        model=(getattr(config, "architectures", None) or [config.model_type])[0],
        revision=hashlib.sha256(_canonical(lasting)).hexdigest(),
        weights_digest=weights_digest(directory),
        geometry=geometry,
        rope=_canonical(config.rope_parameters).decode(),
    )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode()
