"""What the estimates learn, and how fast."""

from random import Random

import pytest

from kvpool.policy.routing import Load, Observed, Source, Tier, WorkerRef
from kvpool.policy.routing.estimate import Estimate
from kvpool.units import SECOND

FAST, SLOW = WorkerRef("prefill", "fast", 1), WorkerRef("prefill", "slow", 1)


def truth(tokens: int, context: int) -> float:
    return 0.01 + 9e-5 * tokens + 2e-9 * tokens * (2 * context + tokens)


def taught(count: int, slow: float = 1.0) -> Estimate:
    estimate, draw = Estimate(), Random(2)
    for _ in range(count):
        worker = draw.choice((FAST, SLOW))
        tokens, context = int(10 ** draw.uniform(1.5, 4.8)), draw.choice((0, 0, 500, 20_000))
        took = truth(tokens, context) * (slow if worker == SLOW else 1.0) * draw.uniform(0.97, 1.03)
        estimate.observe(worker, Observed(context_tokens=context, computed_tokens=tokens, compute_ns=int(took * SECOND)))
    return estimate


def test_prefill_is_learnt_for_short_and_long_prompts() -> None:
    """Fifty prompts with 3 % of noise: within 6 % from 200 tokens to twice what was seen."""
    estimate = taught(50)
    for tokens, context in ((200, 0), (4000, 500), (60_000, 0), (500, 60_000), (120_000, 0)):
        assert estimate.compute_s(tokens, context) == pytest.approx(truth(tokens, context), rel=0.06)


def test_slow_worker_is_told_from_a_fast_one() -> None:
    """One is three times as slow: the ratio is learnt per worker, and forgotten with it."""
    estimate = taught(400, slow=3.0)
    ratio = estimate.compute_s(8000, 0, SLOW) / estimate.compute_s(8000, 0, FAST)
    assert ratio == pytest.approx(3.0, rel=0.15)
    estimate.forget(SLOW)
    assert estimate.compute_s(8000, 0, SLOW) == estimate.compute_s(8000, 0)


def test_unseen_loads_are_ordered_and_seen_ones_are_what_they_took() -> None:
    """Before anything is known: near memory, far memory, near disk, computing. Then a tier's own rate counts."""
    estimate = Estimate()
    order = [estimate.load_s(Source(tier, near, 1000)) for tier, near in ((Tier.DRAM, True), (Tier.DRAM, False), (Tier.SSD, True))]
    assert order == sorted(order)
    assert order[-1] < estimate.compute_s(1000, 0)
    estimate.loaded(Load(Tier.SSD, True, 500, int(0.25 * SECOND)))
    assert estimate.load_s(Source(Tier.SSD, True, 2000)) == pytest.approx(1.0)


def test_step_time_grows_with_the_kv_in_use() -> None:
    """Learnt as base and slope."""
    estimate = Estimate()
    for tokens in range(0, 400_000, 10_000):
        estimate.stepped(tokens, int((0.02 + tokens * 1e-7) * SECOND))
    assert estimate.step_s(0) == pytest.approx(0.02, rel=0.05)
    assert estimate.step_s(300_000) == pytest.approx(0.05, rel=0.05)
