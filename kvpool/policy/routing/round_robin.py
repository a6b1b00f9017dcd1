"""Each worker in its turn, in the order of their ids."""

from collections.abc import Sequence

from kvpool.policy.routing.quiet import Quiet
from kvpool.policy.routing.sort import ranking, without_pulls
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored, WorkerRef


class RoundRobin(Quiet):
    """The first one is the next behind the one that was sent the request before."""

    name = "round_robin"

    def __init__(self, seed: int = 0) -> None:
        self._last: WorkerRef | None = None

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`."""
        ordered = sorted(candidates, key=lambda c: c.worker)
        passed = sum(self._last is not None and c.worker <= self._last for c in ordered)
        turns = ordered[passed:] + ordered[:passed]
        scored = [Scored(c, turn, (("turn", turn),), *without_pulls(c, ask.prompt_tokens)) for turn, c in enumerate(turns)]
        return ranking(self.name, "", scored)

    def routed(self, ask: Ask, scored: Scored, now_ns: int) -> None:
        """See `Policy.routed`."""
        self._last = scored.worker
