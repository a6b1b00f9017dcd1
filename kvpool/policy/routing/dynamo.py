"""NVIDIA Dynamo's KV router, from its documentation (docs.nvidia.com/dynamo, components/router).

    cost = overlap_weight x prefill blocks + decode blocks

Prefill blocks: those of the prompt that the worker doesn't hold, and those it has still to prefill for others. Decode blocks: KV of
the requests under way there. The least cost is taken at `temperature` 0 (the default); above it the worker is drawn by
softmax(-cost / (range of the costs) / temperature). Defaults are the documented ones: weight 1, temperature 0.
"""

from collections.abc import Sequence
from math import exp
from random import Random

from kvpool.policy.routing.quiet import Quiet
from kvpool.policy.routing.sort import ranking, without_pulls
from kvpool.policy.routing.values import Ask, Candidate, Ranking, Scored

_BLOCK_TOKENS = 64


class DynamoCost(Quiet):
    """Blocks to prefill and blocks in use. See the top of this file."""

    name = "dynamo"

    def __init__(self, seed: int = 0, *, overlap_weight: float = 1.0, temperature: float = 0.0, block_tokens: int = _BLOCK_TOKENS) -> None:
        self._choice = Random(seed)
        self._weight = overlap_weight
        self._temperature = temperature
        self._block_tokens = block_tokens

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`."""
        found = ranking(self.name, "blocks", [self._score(c, ask.prompt_tokens) for c in candidates])
        if found is None or not self._temperature:
            return found
        healthy = [s for s in found.scored if s.candidate.suspect == found.best.candidate.suspect]
        span = (healthy[-1].cost - healthy[0].cost) or 1.0
        weights = [exp((healthy[0].cost - s.cost) / span / self._temperature) for s in healthy]
        drawn = self._choice.choices(healthy, weights)[0]
        return found._replace(scored=(drawn, *(s for s in found.scored if s is not drawn)))

    def _score(self, c: Candidate, prompt: int) -> Scored:
        fetch, compute = without_pulls(c, prompt)
        prefill = self._weight * (compute + c.backlog_tokens) / self._block_tokens
        decode = c.decode_tokens / self._block_tokens
        return Scored(c, prefill + decode, (("prefill", prefill), ("decode", decode)), fetch, compute)
