"""Mooncake's Algorithm 1."""

import pytest

from kvpool.policy.routing import Ask, Candidate, Ranking, Source, Tier, WorkerRef
from kvpool.policy.routing.mooncake import MooncakeAlgorithm1


def instance(index: int, own: int, best: int) -> Candidate:
    """An instance that has `own` tokens of a prompt of which another has `best`."""
    pool = [Source(Tier.DRAM, True, own)] if own else []
    if best > own:
        pool.append(Source(Tier.DRAM, False, best - own))
    return Candidate(worker=WorkerRef("prefill", f"{index:02d}", 1), pool=tuple(pool))


def rank(policy: MooncakeAlgorithm1, *candidates: Candidate, name: str = "r") -> Ranking:
    ranking = policy.rank(Ask(name, 10_000), candidates, 0)
    assert ranking is not None
    return ranking


def test_below_the_threshold_it_computes_and_above_it_transfers() -> None:
    """best / own = 2: transferred with a threshold of 1.9, computed with one of 2."""
    candidate = instance(0, 4000, 8000)
    pulled = rank(MooncakeAlgorithm1(kvcache_balancing_threshold=1.9), candidate).best
    assert (pulled.fetch_tokens, pulled.compute_tokens) == (8000, 2000)
    assert dict(pulled.terms)["transfer"] > 0
    computed = rank(MooncakeAlgorithm1(kvcache_balancing_threshold=2.0), candidate).best
    assert (computed.fetch_tokens, computed.compute_tokens) == (4000, 6000)
    assert dict(computed.terms)["transfer"] == 0


def test_an_instance_with_nothing_transfers_whatever_the_threshold() -> None:
    """best / 0 is beyond every threshold."""
    assert rank(MooncakeAlgorithm1(kvcache_balancing_threshold=1e9), instance(0, 0, 8000)).best.fetch_tokens == 8000


def test_ttft_is_the_sum_and_the_holder_wins_until_its_queue_is_longer() -> None:
    """The queue is the sum of the prefill times of those there."""
    policy = MooncakeAlgorithm1()
    holder, other = instance(0, 8000, 8000), instance(1, 0, 8000)
    first = rank(policy, holder, other)
    assert first.best.worker.id == "00"
    assert first.best.cost == pytest.approx(sum(value for _, value in first.best.terms))
    for number in range(4):
        policy.routed(Ask(str(number), 10_000), first.scored[0], 0)
    crowded = rank(policy, holder, other)
    queue = {scored.worker.id: dict(scored.terms)["queue"] for scored in crowded.scored}
    assert queue["00"] == pytest.approx(4 * dict(first.best.terms)["prefill"])
    assert crowded.best.worker.id == "01"
