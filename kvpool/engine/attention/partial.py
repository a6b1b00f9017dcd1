"""Attention over a part of the tokens, and the sum of such parts: exact, whatever the parts (log-sum-exp).

Theory. With scores s_t of one query, softmax attention is ``o = sum exp(s_t) v_t / sum exp(s_t)``. Over a part of the tokens keep o
and ``lse = log sum exp(s_t)``. Two disjoint parts then make their union: ``lse = logaddexp(lse_a, lse_b)``, and
``o = o_a exp(lse_a - lse) + o_b exp(lse_b - lse)``. Nothing is lost, so parts may be computed anywhere and in any order, and an
estimate of a part has the same form as the part.

Shapes. Query heads that share a KV head are rows of one matrix: queries ``[kv_heads, rows, dim]`` where rows = group * n.
`grouped` and `ungrouped` go there and back; row r is of the token r mod n. Scores are float32 whatever the inputs are.
"""

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over some tokens: `out` ``[..., rows, dim]`` and `lse` ``[..., rows]`` (float32; -inf where a row saw nothing)."""

    out: Tensor
    lse: Tensor


def grouped(queries: Tensor, kv_heads: int) -> Tensor:
    """``[heads, n, dim]`` as ``[kv_heads, group * n, dim]``."""
    heads, n, dim = queries.shape
    return queries.reshape(kv_heads, heads // kv_heads * n, dim)


def ungrouped(rows: Tensor, heads: int) -> Tensor:
    """``[kv_heads, group * n, dim]`` as ``[heads, n, dim]``."""
    return rows.reshape(heads, -1, rows.shape[-1])


def causal(rows: int, before: int, n: int, device: torch.device) -> Tensor:
    """Which of `before` + `n` tokens each of the rows (group * n) of the last `n` may see: all before, and up to itself."""
    visible = torch.ones(n, before + n, dtype=torch.bool, device=device).tril(before)
    return visible.repeat(rows // n, 1)


def scores(queries: Tensor, keys: Tensor, scale: float, visible: Tensor | None = None) -> Tensor:
    """Scaled products ``[..., rows, tokens]`` in float32, -inf where not `visible`."""
    products = torch.matmul(queries, keys.transpose(-1, -2)).float() * scale
    return products if visible is None else products.masked_fill(~visible, -torch.inf)


def attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float, visible: Tensor | None = None) -> Partial:
    """Attention of `queries` ``[..., rows, dim]`` over `keys` and `values` ``[..., tokens, dim]``."""
    products = scores(queries, keys, scale, visible)
    lse = torch.logsumexp(products, dim=-1)
    weights = torch.exp(products - _finite(lse)[..., None])
    return Partial(torch.matmul(weights.to(values.dtype), values), lse)


def merge(parts: Iterable[Partial]) -> Partial:
    """The attention over all tokens of `parts`, of which there is at least one and no two share a token."""
    return reduce(_merge, parts)


def _merge(a: Partial, b: Partial) -> Partial:
    lse = torch.logaddexp(a.lse, b.lse)
    base = _finite(lse)
    share_a, share_b = (torch.exp(part.lse - base)[..., None] for part in (a, b))
    out = a.out.float() * share_a + b.out.float() * share_b
    return Partial(out.to(a.out.dtype), lse)


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 where nothing was seen, so that weights there are exp(-inf) = 0 and not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
