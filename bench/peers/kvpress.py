"""NVIDIA kvpress: which tokens its presses keep, of keys and attention weights that are given to it.

`python -m bench.peers.kvpress IN OUT`: IN is a torch file with, per layer, `keys` ``[kv_heads, tokens, dim]`` and `attention`
``[heads, tokens, tokens]``, and the number `kept`; OUT becomes one with `version` and, per press and layer, the ids kept ``[kv_heads,
kept]``, ascending.
"""

import importlib
import sys
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch


def main(source: str, target: str) -> None:
    api = importlib.import_module("kvpress")
    given = torch.load(source)
    tokens = next(iter(given["layers"].values()))["keys"].shape[1]
    ratio = 1 - given["kept"] / tokens
    presses = {
        "streaming": api.StreamingLLMPress(compression_ratio=ratio, n_sink=4),
        "snapkv": api.SnapKVPress(compression_ratio=ratio, window_size=32, kernel_size=5),
        "h2o": api.ObservedAttentionPress(compression_ratio=ratio),
    }
    kept = {
        name: {layer: kept_by(press, **of, kept=given["kept"]) for layer, of in given["layers"].items()} for name, press in presses.items()
    }
    torch.save({"version": version("kvpress"), "kept": kept}, target)


def kept_by(press: Any, keys: torch.Tensor, attention: torch.Tensor, kept: int) -> torch.Tensor:
    """The ids that `press` keeps: it is asked to compress values that say where they are from."""
    heads, tokens, dim = keys.shape
    config = SimpleNamespace(num_attention_heads=len(attention), num_key_value_heads=heads)
    where = torch.arange(tokens, dtype=torch.float32)[:, None].expand(heads, tokens, dim)[None]
    hidden = torch.zeros(1, tokens, 1)
    _, values = press.compress(SimpleNamespace(config=config, head_dim=dim), hidden, keys[None], where, attention[None], {})
    ids: torch.Tensor = values[0, :, :, 0].long().sort(dim=1).values
    assert ids.shape == (heads, kept), (ids.shape, kept)
    return ids


if __name__ == "__main__":
    main(*sys.argv[1:])
