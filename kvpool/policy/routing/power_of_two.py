"""Of two workers drawn at random the less busy one: nearly as even as asking all, with stale views too.

M. Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 12(10), 2001.
"""

from collections.abc import Sequence
from random import Random

from kvpool.policy.routing.quiet import Quiet
from kvpool.policy.routing.sort import without_pulls
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored


class PowerOfTwo(Quiet):
    """The two drawn ones come first, the less busy before the other; the rest follow by load. Suspects are drawn if there are no others."""

    name = "power_of_two"

    def __init__(self, seed: int = 0) -> None:
        self._choice = Random(seed)

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`."""
        if not candidates:
            return None
        ordered = sorted(candidates, key=lambda c: (c.suspect, c.worker))
        healthy = [c for c in ordered if not c.suspect] or ordered
        drawn = {c.worker for c in self._choice.sample(healthy, min(2, len(healthy)))}
        ordered.sort(key=lambda c: (c.worker not in drawn, c.suspect, c.active, c.worker))
        scored = [
            Scored(c, c.active, (("active", c.active), ("drawn", float(c.worker in drawn))), *without_pulls(c, ask.prompt_tokens))
            for c in ordered
        ]
        return Ranking(self.name, "requests", tuple(scored))
