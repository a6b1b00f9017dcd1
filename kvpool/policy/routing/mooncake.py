"""Mooncake, Algorithm 1: KVCache-centric scheduling (Qin et al., FAST'25, section 4; arXiv 2407.00079).

For each prefill instance: if the longest prefix match anywhere is more than `kvcache_balancing_threshold` times the instance's own, it
would transfer the difference first, else it computes on what it has. TTFT = transfer + queue + prefill; the least is taken. The queue is
the sum of the estimated prefill times of the requests there; prefill and transfer times come from a model of past ones (here
`estimate.py`, learnt online). The paper sets the threshold by hand and doesn't say to what; 1 here: any longer match is worth a transfer.

What an instance has of its own is what is resident or near; the longest match is the longest that any candidate could load.
"""

from collections.abc import Sequence

from kvpool.policy.routing.learning import Learning
from kvpool.policy.routing.sort import ranking
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored
from kvpool.policy.routing.workload import WorkerOrder


class MooncakeAlgorithm1(Learning):
    """Least of transfer + queue + prefill, with a threshold for transfers."""

    name = "mooncake"

    def __init__(self, seed: int = 0, *, kvcache_balancing_threshold: float = 1.0) -> None:
        super().__init__(WorkerOrder.ARRIVAL)
        self._threshold = kvcache_balancing_threshold

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`."""
        best = max((min(c.held_tokens, ask.prompt_tokens) for c in candidates), default=0)
        return ranking(self.name, "s", [self._score(c, ask.prompt_tokens, best, now_ns) for c in candidates])

    def _score(self, c: Candidate, prompt: int, best: int, now_ns: int) -> Scored:
        own, transfer = min(c.near_tokens, prompt), 0.0
        tokens = own
        if best > own * self._threshold:
            tokens = max(own, min(c.held_tokens, prompt))
            transfer = sum(self.estimate.load_s(source) for source in c.pool if not source.near)
        prefill = self.estimate.compute_s(prompt - tokens, tokens, c.worker)
        queue, _ = self.wait_s(c, prefill, now_ns)
        terms = (("queue", queue), ("transfer", transfer), ("prefill", prefill))
        return Scored(c, queue + transfer + prefill, terms, max(0, tokens - c.resident_tokens), prompt - tokens)
