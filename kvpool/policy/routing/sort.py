"""What every policy does with its scores: best first, suspects behind all others, equal ones in a fixed order."""

from collections.abc import Iterable

from kvpool.policy.routing.values import Candidate, Ranking, Scored


def ranking(policy: str, unit: str, scored: Iterable[Scored]) -> Ranking | None:
    """Suspects last, then by cost; equal ones to the least busy, then to the smallest id. None without candidates."""
    ordered = sorted(scored, key=lambda s: (s.candidate.suspect, s.cost, s.candidate.active, s.candidate.worker))
    return Ranking(policy, unit, tuple(ordered)) if ordered else None


def without_pulls(candidate: Candidate, prompt_tokens: int) -> tuple[int, int]:
    """(fetch, compute) tokens of a worker that uses what is resident and near, and computes the rest."""
    near = min(candidate.near_tokens, prompt_tokens)
    return max(0, near - candidate.resident_tokens), prompt_tokens - near


def with_pulls(candidate: Candidate, prompt_tokens: int) -> tuple[int, int]:
    """(fetch, compute) tokens of a worker that loads all that the pool holds for it."""
    held = min(candidate.held_tokens, prompt_tokens)
    return max(0, held - candidate.resident_tokens), prompt_tokens - held
