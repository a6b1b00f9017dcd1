"""What a token is worth to the queries that choose, and which tokens stay for it.

Theory. A token adds ``a_t v_t`` to a query's output. Its weight alone doesn't say how much that is: sinks have much weight and hardly any
value (VATP, arXiv 2406.12335). And KV heads differ in how many tokens they need. With one budget for all heads of a layer each gets as many
as are worth more than the others' (AdaKV, arXiv 2407.11550): what is added can be compared between heads; weights can't, they add up to
one in each.
"""

import torch
from torch import Tensor

from kvpool.engine.attention.settings import Heads, Pay


def payments(weights: Tensor, values: Tensor, power: int, pay: Pay) -> Tensor:
    """What each row pays each token, ``[kv_heads, rows, tokens]`` like its attention `weights`; `values` ``[kv_heads, tokens, dim]``.

    To the power of `power`: the length of what the token adds to the row's output, or its weight.
    """
    if pay == "output":
        weights = weights * values.float().norm(dim=-1)[:, None]
    return weights.pow(power)


def worthiest(worth: Tensor, each: int, heads: Heads) -> Tensor:
    """Which tokens are the `each` worthiest of every head, or of all heads as many together: bool, like `worth` ``[kv_heads, tokens]``."""
    rows = worth if heads == "own" else worth.reshape(1, -1)
    best = rows.topk(each * (len(worth) // len(rows)), dim=1).indices
    return torch.zeros_like(rows, dtype=torch.bool).scatter_(1, best, True).view(worth.shape)


def packed(staying: Tensor) -> tuple[Tensor, Tensor]:
    """The positions that are true in `staying` ``[kv_heads, tokens]``, ascending; rows are filled up, and the second says what is real."""
    width = int(staying.sum(dim=1).max())
    at = (~staying).sort(dim=1, stable=True).indices[:, :width]
    return at, staying.gather(1, at)
