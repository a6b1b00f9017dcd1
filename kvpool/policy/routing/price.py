"""The shadow price of memory: what one more token of KV costs where there is no room for it. Pure.

Theory. A store that keeps what is worth most has a price: what leaves next is worth (chance that it is asked for) x (seconds to compute
it again), by which `ReuseValue` ranks, a token at a time. Whoever brings in a new token pays that; where there is room left, nothing.
Between both there is no step: the price counts for the tokens that don't fit.

Any policy's victims teach that price without its model: of the tokens that left lately so many were asked for again, each costing its
recompute. `Regret` counts that. It is what eviction really gives up, in seconds a token.
"""

from collections import OrderedDict
from collections.abc import Hashable

_KEEP = 1 << 14
_FADE = 0.5 ** (1 / 4096)


def memory_s(price_s: float, new_tokens: int, free_tokens: int) -> float:
    """What `new_tokens` cost in a place with room for `free_tokens`: the price for each that doesn't fit."""
    return price_s * max(0, new_tokens - free_tokens)


class Regret:
    """The price of one store, learnt from what left and was asked for again. Remembers at most `keep` blocks that left."""

    def __init__(self, keep: int = _KEEP) -> None:
        self._left: OrderedDict[Hashable, float] = OrderedDict()
        self._keep = keep
        self._tokens = 0.0
        self._seconds = 0.0

    def left(self, key: Hashable, tokens: int, recompute_s: float) -> None:
        """A block of `tokens` was evicted; to compute it again would take `recompute_s`."""
        self._left[key] = recompute_s
        self._left.move_to_end(key)
        self._tokens = self._tokens * _FADE + tokens
        self._seconds *= _FADE
        if len(self._left) > self._keep:
            self._left.popitem(last=False)

    def wanted(self, key: Hashable) -> None:
        """Somebody asked for a block that isn't here."""
        self._seconds += self._left.pop(key, 0.0)

    @property
    def price_s(self) -> float:
        """Seconds a token; 0 as long as nothing has left."""
        return self._seconds / self._tokens if self._tokens else 0.0
