"""Ours: the worker where the request costs everybody the least time to the first token.

    cost = queue + load + compute + adapter + memory + others + recent

| term | seconds |
|---|---|
| queue | until the worker gets to it, by the order in which it computes (workload.py) |
| load | of what comes from the pool, by tier and link, the part that the queue does not hide: loads begin while the request waits |
| compute | of what is missing, by its length and the length of its context |
| adapter | to load its LoRA adapter, where that isn't loaded |
| memory | what must leave for its KV is worth, to whoever would have used it: the price by which eviction chooses (policy/price.py); in the
|  | worker for all that it hasn't got, in the pool for what it computes |
| others | by which it delays those who are there already; more, the more its tenant has beyond its share |
| recent | a little for having been busy lately, which spreads what is otherwise equal |

Everything is learnt online (estimate.py). No term has a threshold at which hot prefixes suddenly move: a token more or less, or a
millisecond, changes a cost by no more than `AGING` of the age of who is passed by it. A hot prefix spreads as soon as the queue at its
holder costs more than loading it elsewhere; a worker that computes short work first lets the short one pass and the long one pay, which
`others` counts.

From the pool it takes as many of the sources, in order, as make it faster: where a disk is slower than computing, the rest is computed.
Of what another request is computing now (`Ask.pending`) it takes the better of waiting for it and computing it too, where a second of
computing counts a tenth more than one of waiting. Who asks before anybody is chosen (`waits`) is told to be more patient: of many that
come at once none has a queue before it yet, and what each of them computed would be the same.

A decode worker may prefill a prompt itself, between its steps. It helps where the best prefill worker is busy with others: then it
is one candidate more, as slow as it has shown to be (`rank_with_help`). Where only decode workers are candidates, they are ranked by
when the answer would be complete: queue, load and compute as above, plus a step for every token, each as long as the KV in use there
makes it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.policy.price import memory_s
from kvpool.policy.routing.learning import Learning
from kvpool.policy.routing.recent import Recent
from kvpool.policy.routing.sort import ranking
from kvpool.policy.routing.values import Ask, Candidate, Pending, Ranking, Scored, Source, Tier, WorkerRef
from kvpool.policy.routing.workload import WorkerOrder
from kvpool.units import SECOND

RECENT_S = 0.05
"""What it costs to have been busy all the time lately."""
_MOST_CARE = 8.0
_PATIENCE = 2.0
_WORK = 0.1  # of two ways on one worker, a second of computing counts so much more than one of waiting: it leaves room for others


class _Way(NamedTuple):
    """One way to get the prompt's KV: seconds until loads are through, and to compute the rest."""

    loaded_s: float
    compute_s: float
    fetch: int
    compute: int
    wait_s: float = 0.0


class LeastTtft(Learning):
    """Least estimated time to the first token, own and others'. See the top of this file."""

    name = "ttft"

    def __init__(self, seed: int = 0, *, order: WorkerOrder = WorkerOrder.SHORTEST) -> None:
        """`order`: how the workers compute what they are given; that of our engine."""
        super().__init__(order)
        self._recent = Recent()

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """See `Policy.rank`."""
        score = self._decode if all(c.worker.role == "decode" for c in candidates) else self._prefill
        return ranking(self.name, "s", [score(ask, c, now_ns) for c in candidates])

    def rank_with_help(self, ask: Ask, candidates: Sequence[Candidate], helpers: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """`candidates`, ranked; with `helpers` among them where the best of them is busy with others."""
        alone = self.rank(ask, candidates, now_ns)
        if alone is None or not helpers or not any(value > 0 for name, value in alone.best.terms if name in ("queue", "others")):
            return alone
        return self.rank(ask, [*candidates, *helpers], now_ns)

    def waits(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> bool:
        """Whether to wait for `ask.pending`, which makes the first token at most `_PATIENCE` times as late as not to."""
        alone = behind = float("inf")
        for c in candidates:
            ways = self._ways(ask._replace(pending=()), c, now_ns)
            alone = min(alone, *(self._first_token_s(c, way, now_ns) for way in ways))
            late = [self._behind(pending, c, ways[-1], ask.prompt_tokens, now_ns) for pending in ask.pending]
            behind = min(behind, *(self._first_token_s(c, way, now_ns) for way in late))
        return behind <= _PATIENCE * alone

    def routed(self, ask: Ask, scored: Scored, now_ns: int) -> None:
        """See `Policy.routed`."""
        super().routed(ask, scored, now_ns)
        context = ask.prompt_tokens - scored.compute_tokens
        self._recent.add(scored.worker, self.estimate.compute_s(scored.compute_tokens, context, scored.worker), now_ns)

    def forget(self, worker: WorkerRef) -> None:
        """See `Policy.forget`."""
        super().forget(worker)
        self._recent.forget(worker)

    def _prefill(self, ask: Ask, c: Candidate, now_ns: int) -> Scored:
        best: tuple[float, _Way, float, float] | None = None
        for way in self._ways(ask, c, now_ns):
            queue, others = self.wait_s(c, way.compute_s, now_ns)
            stall = max(0.0, way.loaded_s - queue)
            cost = queue + stall + (1.0 + _WORK) * way.compute_s
            if best is None or cost < best[0]:
                best = cost, way, queue, others
        assert best is not None
        _, way, queue, others = best
        care = min(_MOST_CARE, max(1.0, ask.tenant_share))
        terms = (
            ("queue", queue),
            ("load", max(0.0, way.loaded_s - queue)),
            ("compute", way.compute_s),
            *self._room(ask, c, way),
            ("others", care * others),
            ("recent", RECENT_S * self._recent.share(c.worker, now_ns)),
        )
        return _scored(c, terms, way)

    def _decode(self, ask: Ask, c: Candidate, now_ns: int) -> Scored:
        way = min(self._ways(ask, c, now_ns), key=lambda w: w.loaded_s + w.compute_s)
        in_use = c.decode_tokens + ask.prompt_tokens
        queue, _ = self.wait_s(c, way.compute_s, now_ns)
        terms = (
            ("queue", queue),
            ("load", max(0.0, way.loaded_s - queue)),
            ("compute", way.compute_s),
            *self._room(ask, c, way),
            ("steps", ask.output_tokens * self.estimate.step_s(in_use)),
            ("others", c.active * ask.output_tokens * max(0.0, self.estimate.step_s(in_use) - self.estimate.step_s(c.decode_tokens))),
        )
        return _scored(c, terms, way)

    def _first_token_s(self, c: Candidate, way: _Way, now_ns: int) -> float:
        queue, _ = self.wait_s(c, way.compute_s, now_ns)
        return max(queue, way.loaded_s) + way.compute_s

    def _room(self, ask: Ask, c: Candidate, way: _Way) -> tuple[tuple[str, float], ...]:
        adapter = 0.0 if c.adapter_loaded else self.estimate.adapter_s
        here, pool = memory_s(c.price_s, way.fetch + way.compute, c.free_tokens), memory_s(c.pool_price_s, way.compute, c.pool_free_tokens)
        return ("adapter", adapter), ("memory", here + pool)

    def _ways(self, ask: Ask, c: Candidate, now_ns: int) -> list[_Way]:
        """Every prefix of the sources, and each computation under way elsewhere that would bring more than all of them."""
        estimate, prompt = self.estimate, ask.prompt_tokens
        held = min(c.resident_tokens, prompt)
        loaded_s, fetch = 0.0, 0
        ways = [_Way(0.0, self.estimate.compute_s(prompt - held, held, c.worker), 0, prompt - held)]
        for source in c.pool:
            tokens = min(source.tokens, prompt - held)
            if tokens <= 0:
                break
            loaded_s = max(loaded_s, source.busy_s) + estimate.load_s(source._replace(tokens=tokens))
            held += tokens
            fetch += tokens
            ways.append(_Way(loaded_s, self.estimate.compute_s(prompt - held, held, c.worker), fetch, prompt - held))
        ways.extend(self._behind(pending, c, ways[-1], prompt, now_ns) for pending in ask.pending if pending.tokens > held)
        return ways

    def _behind(self, pending: Pending, c: Candidate, way: _Way, prompt: int, now_ns: int) -> _Way:
        """Wait for `pending`, and load what it will have computed, unless it does so here."""
        coming = max(min(pending.tokens, prompt), prompt - way.compute)
        more = coming - (prompt - way.compute)
        wait_s = max(0, pending.ready_ns - now_ns) / SECOND
        load_s = 0.0 if pending.worker == c.worker else self.estimate.load_s(Source(Tier.DRAM, False, more))
        compute_s = self.estimate.compute_s(prompt - coming, coming, c.worker)
        return _Way(max(way.loaded_s, wait_s) + load_s, compute_s, way.fetch + more, prompt - coming, wait_s)


def _scored(c: Candidate, terms: tuple[tuple[str, float], ...], way: _Way) -> Scored:
    return Scored(c, sum(value for _, value in terms), terms, way.fetch, way.compute, int(way.wait_s * SECOND))
