"""Which worker serves a phase: the one that is expected to be done with it first.

Costs are counted in tokens of prefill compute, the one unit every candidate shares::

    cost = backlog + ACTIVE_COST * active + FETCH_COST * fetch + compute

    fetch    prompt tokens the pool holds and the worker doesn't: it loads them, far cheaper than computing
    compute  prompt tokens neither holds
    backlog  prompt tokens this router has sent to the worker and that are not through yet
    active   requests this router has running there; each takes a share of the machine

The longest resident match is therefore worth most on an idle worker, and nothing once others wait for it or the pool holds the same.
A suspect (it failed a moment ago) is taken only when there is nobody else. Ties go to the least loaded, then to the smallest
id, so that equal inputs give equal choices.

A worker that was planned for already is kept unless it has become a suspect or KEEP_COST dearer than the best: the blocks are on their way
to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.policy.routing import WorkerRef

ACTIVE_COST = 32.0
FETCH_COST = 0.1
KEEP_COST = 2 * ACTIVE_COST


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that could serve: what of the prompt it is known to hold, what the pool holds for it (tokens), and how busy it is."""

    worker: WorkerRef
    resident_tokens: int = 0
    pool_tokens: int = 0
    active: int = 0
    backlog_tokens: int = 0
    suspect: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One candidate with its cost and what the cost is made of."""

    candidate: Candidate
    cost: float
    fetch_tokens: int
    compute_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The chosen worker and the ranking it comes from, best first."""

    worker: WorkerRef
    ranking: tuple[Scored, ...]

    def explain(self) -> str:
        """One line for the log: every candidate and its cost, the cheapest first, and the chosen one if it is another."""
        kept = "" if self.worker == self.ranking[0].candidate.worker else f"; kept {self.worker.id[:8]}"
        costs = "; ".join(
            f"{scored.candidate.worker.id[:8]} cost {scored.cost:.1f} = backlog {scored.candidate.backlog_tokens}"
            f" + {ACTIVE_COST:g} x {scored.candidate.active} active + {FETCH_COST:g} x {scored.fetch_tokens} to fetch"
            f" + {scored.compute_tokens} to compute{' (suspect)' if scored.candidate.suspect else ''}"
            for scored in self.ranking
        )
        return costs + kept


def choose(candidates: Sequence[Candidate], *, prompt_tokens: int, keep: WorkerRef | None = None) -> Choice | None:
    """The cheapest of `candidates`, or `keep` if it is one and nearly as good; None without candidates."""
    if not candidates:
        return None
    scored = [_score(candidate, prompt_tokens) for candidate in candidates]
    scored.sort(key=lambda s: (s.candidate.suspect, s.cost, s.candidate.active, s.candidate.worker))
    good = [s for s in scored if s.candidate.suspect == scored[0].candidate.suspect and s.cost <= scored[0].cost + KEEP_COST]
    chosen = next((s for s in good if s.candidate.worker == keep), scored[0])
    return Choice(worker=chosen.candidate.worker, ranking=tuple(scored))


def _score(candidate: Candidate, prompt_tokens: int) -> Scored:
    resident = min(candidate.resident_tokens, prompt_tokens)
    fetch = max(0, min(candidate.pool_tokens, prompt_tokens) - resident)
    compute = prompt_tokens - resident - fetch
    cost = candidate.backlog_tokens + ACTIVE_COST * candidate.active + FETCH_COST * fetch + compute
    return Scored(candidate=candidate, cost=cost, fetch_tokens=fetch, compute_tokens=compute)
