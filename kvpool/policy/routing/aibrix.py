"""AIBrix, `prefix-cache` (vllm-project/aibrix, pkg/plugins/gateway/algorithms, Apache-2.0), from its documentation.

1. If the busiest worker has over `imbalance` requests more than the idlest, the load is uneven: the least busy worker.
2. Else the workers that hold a part of the prompt, the longest match first, among equal ones the least busy first: the first of them
   that isn't busier than mean + `deviations` x standard deviation of all.
3. Without one, the least busy worker.

Defaults are the code's: `imbalance` 8, `deviations` 1 (the README of an earlier version had 16 and 2). AIBrix remembers where it sent
which prefix in a table of 200,000 blocks; here it is told what the workers really hold.
"""

from collections.abc import Sequence
from statistics import fmean, pstdev

from kvpool.policy.routing.quiet import Quiet
from kvpool.policy.routing.sort import without_pulls
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored


class AibrixPrefixCache(Quiet):
    """Thresholds on numbers of running requests. See the top of this file."""

    name = "aibrix"

    def __init__(self, seed: int = 0, *, imbalance: int = 8, deviations: float = 1.0) -> None:
        self._imbalance = imbalance
        self._deviations = deviations

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`. The thresholds look at healthy workers only, if there are any."""
        if not candidates:
            return None
        healthy = [c for c in candidates if not c.suspect] or list(candidates)
        running = [c.active for c in healthy]
        uneven = max(running) - min(running) > self._imbalance
        limit = fmean(running) + self._deviations * pstdev(running)
        prompt = max(1, ask.prompt_tokens)

        def key(c: Candidate) -> tuple[object, ...]:
            match = min(1.0, c.near_tokens / prompt)
            fits = not uneven and match > 0 and c.active <= limit
            return c.suspect, not fits, -match if fits else 0.0, c.active, c.worker

        ordered = sorted(candidates, key=key)
        terms = [
            (("match", min(1.0, c.near_tokens / prompt)), ("active", float(c.active)), ("limit", limit), ("uneven", float(uneven)))
            for c in ordered
        ]
        scored = [
            Scored(c, float(place), of, *without_pulls(c, ask.prompt_tokens))
            for place, (c, of) in enumerate(zip(ordered, terms, strict=True))
        ]
        return Ranking(self.name, "", tuple(scored))
