"""The shadow price of memory: what one more token of KV costs where there is no room for it. Pure.

Theory. A store that keeps what is worth most has a price: what leaves next is worth (chance that it is asked for) x (what it takes to have
it again). Whoever brings in a new token pays that; where there is room left, nothing. Between both there is no step: the price counts for
the tokens that don't fit.

Any policy's victims teach that price without its model: of what left lately so much was asked for again, each with its cost. `Regret`
counts that. It is what eviction really gives up. Where a store evicts from several orders, it takes from the one that gives up least now,
so eviction and routing go by the same number.

Costs are in *tokens to compute again*, each as if it stood at the head of a prompt: deeper ones count more (`recompute`), what can be
loaded instead counts less. So a price is in tokens a token, a store needs no clock, and whoever knows how long a token takes has seconds.
"""

from collections import OrderedDict
from collections.abc import Hashable

_KEEP = 1 << 14
_FADE = 0.5 ** (1 / 4096)
_DEPTH_TOKENS = 262_144


def recompute(size: float, depth: int) -> float:
    """What `size` of KV behind `depth` tokens costs to compute again, in sizes at the head of a prompt: attention grows with the depth.

    A 70B Llama has about 1 + depth / 52,000; but what is deep is long, and for eviction the milder form gives up fewer hits.
    """
    return size * (1 + depth / _DEPTH_TOKENS)


def memory_s(price_s: float, new_tokens: int, free_tokens: int) -> float:
    """What `new_tokens` cost in a place with room for `free_tokens`: the price for each that doesn't fit."""
    return price_s * max(0, new_tokens - free_tokens)


class Regret:
    """The price of one order of eviction, learnt from what left and was asked for again. Remembers at most `keep` blocks that left."""

    def __init__(self, keep: int = _KEEP) -> None:
        self._left: OrderedDict[Hashable, float] = OrderedDict()
        self._keep = keep
        self._size = self._ages = self._costs = self._lost = 0.0

    def left(self, key: Hashable, size: int, cost: float, age: float = 1.0) -> None:
        """A block of `size` was evicted that nobody had used for `age`, by any measure; to have it again would take `cost`."""
        self._left.pop(key, None)
        self._left[key] = cost
        self._size = self._size * _FADE + size
        self._ages = self._ages * _FADE + size * age
        self._costs = self._costs * _FADE + cost
        self._lost *= _FADE
        if len(self._left) > self._keep:
            self._left.popitem(last=False)

    def wanted(self, key: Hashable) -> None:
        """Somebody asked for a block that isn't here."""
        self._lost += self._left.pop(key, 0.0)

    @property
    def price(self) -> float:
        """Cost a size; 0 as long as nothing has left."""
        return self._lost / self._size if self._size else 0.0

    def at(self, age: float) -> float:
        """The price of what hasn't been used for `age`: the older, the less likely to be used, as 1 / age, and never more than for sure.

        So times between uses are taken to be spread evenly over their logarithm. What is never evicted gets old, and cheap, and is tried.
        """
        if not self._size:
            return 0.0
        return min(self._costs, self._lost * self._ages / (self._size * max(1.0, age))) / self._size
