"""H2O: accounts of attention, and exactly the budget kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.engine.attention.h2o import H2O
from kvpool.engine.attention.settings import H2OSettings, Score
from kvpool.engine.attention.technique import Seen
from kvpool.errors import LocalError

KV_HEADS, GROUP, DIM = 2, 3, 4


def chunks(lengths: list[int], seed: int) -> list[Seen]:
    """Passes over a random prompt; the rows of queries as they are grouped."""
    draw = torch.Generator().manual_seed(seed)
    keys = 3 * torch.randn(KV_HEADS, sum(lengths), DIM, generator=draw)
    out, end = [], 0
    for n in lengths:
        end += n
        out.append(Seen(torch.randn(KV_HEADS, GROUP * n, DIM, generator=draw), keys[:, :end], n, 0.5))
    return out


def kept(h2o: H2O, past: int) -> list[list[int]]:
    ids = h2o.keep(0, past).ids
    assert ids is not None
    result: list[list[int]] = ids.tolist()
    return result


def plainly(passes: list[Seen], heavy: int, recent: int, settings: H2OSettings) -> list[list[int]]:
    """The same choice by loops over single queries."""
    tokens = passes[-1].keys.shape[1]
    out = []
    for head in range(KV_HEADS):
        paid, could = [0.0] * tokens, [0.0] * tokens
        for seen in passes:
            first = seen.keys.shape[1] - seen.new
            for row in range(GROUP * seen.new):
                upto = first + row % seen.new + 1
                weights = (seen.keys[head, :upto] @ seen.queries[head, row] * seen.scale).softmax(0)
                left = 0.5 ** ((tokens - upto) / settings.fade) if settings.fade else 1.0
                for token, weight in enumerate(weights.tolist()):
                    paid[token] += weight**settings.power * left
                    could[token] += left
        if settings.score == "mean":
            paid = [value / queries for value, queries in zip(paid, could, strict=True)]
        older = sorted(range(tokens - recent), key=lambda token: -paid[token])[:heavy]
        out.append(sorted(older) + list(range(tokens - recent, tokens)))
    return out


@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize(("power", "fade"), [(1, 0), (2, 0), (1, 3), (2, 256)])
def test_keep_is_the_heaviest_and_the_most_recent(score: Score, power: int, fade: int) -> None:
    """By single queries, in chunks of any size, both heads of their own; payments count by their power and fade with each token."""
    passes, settings = chunks([5, 1, 9, 3], seed=1), H2OSettings(budget=9, heavy=0.7, score=score, power=power, fade=fade)
    h2o = H2O(settings)
    for seen in passes:
        h2o.update(0, seen)
    h2o.settle(18)
    found = kept(h2o, 18)
    assert found == plainly(passes, heavy=6, recent=3, settings=settings)
    assert found[0] != found[1]


def test_power_and_fade_keep_other_tokens() -> None:
    """They are not there for nothing: each changes the choice."""
    passes = chunks([5, 1, 9, 3], seed=1)
    ways = [H2OSettings(power=power, fade=fade) for power, fade in ((1, 0), (2, 0), (1, 3))]
    kept_sets = [plainly(passes, heavy=6, recent=3, settings=way) for way in ways]
    assert all(one != other for at, one in enumerate(kept_sets) for other in kept_sets[:at])


def test_accounts_fade_while_tokens_are_generated() -> None:
    """Who was heavy long ago gives way to who is wanted now."""
    keys = torch.zeros(1, 8, 2)
    keys[0, 1, 0] = keys[0, 2, 1] = 9.0
    for fade, stays in ((0, 1), (2, 2)):
        h2o = H2O(H2OSettings(budget=3, heavy=0.34, fade=fade))
        h2o.update(0, Seen(torch.tensor([9.0, 0.0]).expand(1, 8, 2), keys, 8, 1.0))
        h2o.update(0, Seen(torch.tensor([0.0, 9.0]).expand(1, 4, 2), torch.cat((keys, keys[:, 4:]), dim=1), 4, 1.0))
        h2o.settle(12)
        assert kept(h2o, 12) == [[stays, 10, 11]]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    budget=st.integers(2, 30),
    heavy=st.floats(0, 1),
    steps=st.lists(st.integers(1, 3), max_size=8),
)
def test_exactly_the_budget_is_kept_and_who_left_stays_away(seed: int, budget: int, heavy: float, steps: list[int]) -> None:
    """At every step, per head: the budget, ascending, the most recent among them, and nobody returns."""
    draw = torch.Generator().manual_seed(seed)
    h2o = H2O(H2OSettings(budget=budget, heavy=heavy))
    h2o.update(0, Seen(torch.randn(1, 16, DIM, generator=draw), torch.randn(1, 16, DIM, generator=draw), 16, 0.5))
    h2o.settle(16)
    past, before = 16, set(range(16))
    recent = budget - int(budget * heavy)
    for n in [*steps, 0]:
        ids = h2o.keep(0, past).ids
        now = list(range(past)) if ids is None else ids[0].tolist()
        assert len(now) == min(budget, past)
        assert now == sorted(set(now))
        assert set(now) <= before
        assert set(now) >= set(range(max(0, past - recent), past))
        if n:
            h2o.update(0, Seen(torch.randn(1, n, DIM, generator=draw), torch.randn(1, len(now) + n, DIM, generator=draw), n, 0.5))
            before = set(now) | set(range(past, past + n))
            past += n


def test_an_evicted_token_is_the_lightest_outside_the_recent() -> None:
    """One token a step leaves: here the one that no query looks at."""
    keys = torch.zeros(1, 4, 2)
    keys[0, :, 0] = torch.tensor([3.0, -9.0, 3.0, 3.0])
    looks = torch.tensor([1.0, 0.0])
    h2o = H2O(H2OSettings(budget=4, heavy=0.5))
    h2o.update(0, Seen(looks.expand(1, 4, 2), keys, 4, 1.0))
    h2o.settle(4)
    assert h2o.keep(0, 4).ids is None
    h2o.update(0, Seen(looks.expand(1, 1, 2), torch.cat((keys, keys[:, :1]), dim=1), 1, 1.0))
    assert kept(h2o, 5) == [[0, 2, 3, 4]]


def test_h2o_refuses_a_prompt_whose_queries_it_has_not_seen() -> None:
    """Tokens that were loaded have no account; a choice without them would be another technique."""
    loaded = Seen(torch.randn(1, 2, DIM), torch.randn(1, 10, DIM), 2, 1.0)
    h2o = H2O(H2OSettings())
    assert h2o.traits.prompt_queries is None
    with pytest.raises(LocalError, match="whole prompt"):
        h2o.update(0, loaded)
    h2o.settle(10)
    with pytest.raises(LocalError, match="whole prompt"):
        h2o.keep(1, 10)
