"""Dynamo's documented cost."""

from collections import Counter

import pytest

from kvpool.policy.routing import Ask, Candidate, Source, Tier, WorkerRef
from kvpool.policy.routing.dynamo import DynamoCost


def worker(index: int, held: int = 0, backlog: int = 0, decode: int = 0) -> Candidate:
    pool = (Source(Tier.DRAM, True, held),) if held else ()
    return Candidate(worker=WorkerRef("decode", f"{index:02d}", 1), pool=pool, backlog_tokens=backlog, decode_tokens=decode)


def test_cost_is_weighted_prefill_blocks_and_decode_blocks() -> None:
    """By hand: (1000 - 200 + 400) / 100 x 2 + 3000 / 100."""
    policy = DynamoCost(overlap_weight=2.0, block_tokens=100)
    ranking = policy.rank(Ask("r", 1000), [worker(0, 200, 400, 3000)], 0)
    assert ranking is not None
    assert ranking.best.cost == pytest.approx(54.0)
    assert dict(ranking.best.terms) == pytest.approx({"prefill": 24.0, "decode": 30.0})


def test_temperature_zero_takes_the_least_and_weight_zero_ignores_overlap() -> None:
    """Defaults are deterministic; the weight alone decides what overlap is worth."""
    cluster = [worker(0, 900, 0, 500), worker(1, 0, 0, 0)]
    best = DynamoCost().rank(Ask("r", 1000), cluster, 0)
    blind = DynamoCost(overlap_weight=0.0).rank(Ask("r", 1000), cluster, 0)
    assert best is not None
    assert blind is not None
    assert (best.best.worker.id, blind.best.worker.id) == ("00", "01")


def test_temperature_draws_by_softmax_of_normalised_costs() -> None:
    """Costs span 0..1 after normalising: at temperature 1 the better one is e times as likely."""
    policy = DynamoCost(5, temperature=1.0)
    counts: Counter[str] = Counter()
    for _ in range(2000):
        ranking = policy.rank(Ask("r", 1000), [worker(0, 900), worker(1)], 0)
        assert ranking is not None
        counts[ranking.best.worker.id] += 1
    assert counts["00"] / counts["01"] == pytest.approx(2.718, rel=0.15)
