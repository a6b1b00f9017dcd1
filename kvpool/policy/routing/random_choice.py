"""Any worker, each as likely: the yardstick below which nothing should fall."""

from collections.abc import Sequence
from random import Random

from kvpool.policy.routing.quiet import Quiet
from kvpool.policy.routing.sort import ranking, without_pulls
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored


class RandomChoice(Quiet):
    """A random order, drawn from a seeded generator."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._choice = Random(seed)

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`."""
        draw = self._choice.random
        return ranking(self.name, "", [Scored(c, draw(), (), *without_pulls(c, ask.prompt_tokens)) for c in candidates])
