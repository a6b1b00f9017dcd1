"""The worker with the fewest requests: what Mooncake calls load balancing (FAST'25, 4.1), and most gateways do by default.

Among equally busy ones the turn goes round, or an idle cluster would send all to the first.
"""

from collections.abc import Sequence

from kvpool.policy.routing.round_robin import RoundRobin
from kvpool.policy.routing.sort import without_pulls
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored


class LeastLoaded(RoundRobin):
    """Fewest active requests first, then whose turn it is."""

    name = "least_loaded"

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`."""
        turns = super().rank(ask, candidates, now_ns)
        if turns is None:
            return None
        scored = [
            Scored(s.candidate, s.candidate.active, (("active", s.candidate.active),), *without_pulls(s.candidate, ask.prompt_tokens))
            for s in turns.scored
        ]
        scored.sort(key=lambda s: (s.candidate.suspect, s.cost))  # stable: equal ones by turn
        return Ranking(self.name, "requests", tuple(scored))
