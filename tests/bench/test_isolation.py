"""The measure of the isolation bench: what AUC says, and that a row is counted right."""

import asyncio
import random

import numpy as np
import pytest

from bench.isolation import PROMPT_TOKENS, auc, measure


@pytest.mark.parametrize(
    ("cached", "other", "expected"),
    [([3, 4], [1, 2], 1.0), ([1, 2], [3, 4], 0.0), ([1, 1], [1, 1], 0.5), ([1, 3], [2, 2], 0.5), ([2, 3], [1, 2, 4], 3.5 / 6)],
)
def test_auc_is_the_chance_that_cached_is_longer(cached: list[float], other: list[float], expected: float) -> None:
    """Ties count half."""
    assert auc(cached, other) == pytest.approx(expected)
    pairs = [(a > b) + 0.5 * (a == b) for a in cached for b in other]
    assert auc(cached, other) == pytest.approx(float(np.mean(pairs)))


def test_a_leak_is_seen_and_noise_is_not() -> None:
    """A cache that tells by time, for the victim's colleague only."""
    cache: set[tuple[str, tuple[int, ...]]] = set()
    tenants = {"victim": "acme", "colleague": "acme", "attacker": "other"}
    noise = random.Random(1)

    async def ask(user: str, prompt: list[int]) -> tuple[float, int]:
        entry = (tenants[user], tuple(prompt))
        hit = entry in cache
        cache.add(entry)
        return noise.gauss(1.0 if hit else 2.0, 0.2), PROMPT_TOKENS if hit else 0

    row = asyncio.run(measure("twin", {"prime": ask, "probe": ask}, 1000, 1 << 16))
    assert row.attacker_hits == 0
    assert abs(row.auc - 0.5) < 0.1
    assert row.control_auc < 0.05

    tenants["attacker"] = "acme"
    leaky = asyncio.run(measure("leaky", {"prime": ask, "probe": ask}, 400, 1 << 16))
    assert leaky.attacker_hits > 100
    assert leaky.auc < 0.05
