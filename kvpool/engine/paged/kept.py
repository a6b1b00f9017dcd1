"""Blocks that no table holds and that can be found by a name: which of them goes first, and what that costs. Pure.

Theory. What goes costs what it takes to have it again when a prompt asks for it: a load where the pool has it, a computation where nobody
has. So there are two orders, each with the least recently used first, and each with its own price, learnt from what left it and was asked
for (`kvpool.policy.price`). The next to go is the first of the order where that costs less now, by its price and by how long the first has
not been used, counted in blocks that were put here since. The price of what goes next is what a router is told (`Pressure`), so eviction
and routing go by one number.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvpool.block import BlockKey
from kvpool.policy.price import Regret, recompute

LOADED = 0.1
"""What loading a token costs of what computing one does, until that was measured."""


class Kept:
    """Blocks by number. `load_share`: what loading a token costs of what computing one does."""

    def __init__(self, load_share: Callable[[], float] = lambda: LOADED) -> None:
        self._load_share = load_share
        self._orders: dict[bool, OrderedDict[int, int]] = {pooled: OrderedDict() for pooled in (True, False)}  # block: `_puts` then
        self._regrets = {pooled: Regret() for pooled in self._orders}
        self._puts = 0

    def __len__(self) -> int:
        return sum(map(len, self._orders.values()))

    def __contains__(self, block: int) -> bool:
        return any(block in order for order in self._orders.values())

    def put(self, block: int, *, pooled: bool) -> None:
        """Nobody holds `block` any more. `pooled`: the pool has it too."""
        self._puts += 1
        self._orders[pooled][block] = self._puts

    def take(self, block: int) -> None:
        """Somebody holds `block` again."""
        if self._orders[True].pop(block, None) is None:
            del self._orders[False][block]

    def first(self) -> int:
        """Who goes next; there must be somebody."""
        return next(iter(self._orders[self._next()]))

    def left(self, block: int, key: BlockKey, tokens: int, depth: int) -> None:
        """`block`, which held `tokens` behind `depth` others under `key`, was given up."""
        pooled = block in self._orders[True]
        since = self._orders[pooled].pop(block)
        cost = tokens * min(1.0, self._load_share()) if pooled else recompute(tokens, depth)
        self._regrets[pooled].left(key, tokens, cost, self._age(since))

    def wanted(self, keys: Iterable[BlockKey]) -> None:
        """A prompt asks for these, and they aren't here."""
        for key in keys:
            for regret in self._regrets.values():
                regret.wanted(key)

    @property
    def price(self) -> float:
        """What a token costs by what goes next, in tokens to compute again; 0 when nobody is here."""
        return self._cost(self._next()) if len(self) else 0.0

    def _next(self) -> bool:
        """From which order the next one goes; of equal ones that of which the pool has copies."""
        return min((pooled for pooled, order in self._orders.items() if order), key=self._cost)

    def _cost(self, pooled: bool) -> float:
        return self._regrets[pooled].at(self._age(next(iter(self._orders[pooled].values()))))

    def _age(self, since: int) -> int:
        return self._puts - since + 1
