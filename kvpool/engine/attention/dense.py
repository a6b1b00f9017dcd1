"""Attention of one token to everything, as decode steps take it: the same call with and without a technique, so the same bits."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def one_token(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
    """The output ``[1, heads, 1, v_dim]`` of queries ``[1, heads, 1, k_dim]`` that see all keys ``[1, kv_heads, n, k_dim]``.

    The heads that share keys are the rows of one product, so the keys are read once for all of them.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    rows = query.reshape(1, kv_heads, heads // kv_heads, -1)
    return scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(1, heads, 1, -1)
