"""Attention of one token to everything, as decode steps take it: the same call with and without a technique, so the same bits."""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


def one_token(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None) -> torch.Tensor:
    """The output ``[1, heads, 1, v_dim]`` of queries ``[1, heads, 1, k_dim]`` that see all keys ``[1, kv_heads, n, k_dim]``.

    The heads that share keys are the rows of one product, so the keys are read once for all of them.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    rows = query.reshape(1, kv_heads, heads // kv_heads, -1)
    return scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(1, heads, 1, -1)


def one_token_rows(query: torch.Tensor, output: torch.Tensor, kv_heads: int) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Queries ``[1, heads, n, k_dim]`` and the place of their output ``[n, heads, v_dim]``, token by token as that product has them.

    That is ``[1, kv_heads, heads / kv_heads, dim]``; what is copied to the second appears in `output`.
    """
    n, heads, _ = output.shape
    shape = n, 1, kv_heads, heads // kv_heads, -1
    return query[0].transpose(0, 1).reshape(shape).unbind(0), output.view(shape).unbind(0)
