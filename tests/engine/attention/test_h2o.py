"""H2O: accounts of attention, and exactly the budget kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.engine.attention.h2o import H2O
from kvpool.engine.attention.settings import H2OSettings, Heads, Pay, Score
from kvpool.engine.attention.technique import Seen
from kvpool.errors import LocalError

KV_HEADS, GROUP, DIM = 2, 3, 4


def chunks(lengths: list[int], seed: int) -> list[Seen]:
    """Passes over a random prompt; the rows of queries as they are grouped."""
    draw = torch.Generator().manual_seed(seed)
    keys = 3 * torch.randn(KV_HEADS, sum(lengths), DIM, generator=draw)
    values = torch.tensor([3.0, 1.0])[:, None, None] * torch.randn(KV_HEADS, sum(lengths), DIM, generator=draw)
    out, end = [], 0
    for n in lengths:
        end += n
        out.append(Seen(torch.randn(KV_HEADS, GROUP * n, DIM, generator=draw), keys[:, :end], values[:, :end], n, 0.5))
    return out


def kept(h2o: H2O, past: int) -> list[list[int]]:
    """Per head, without what only fills it up."""
    ids, real, *_ = h2o.keep(0, past)
    assert ids is not None
    assert real is not None
    return [row[counts].tolist() for row, counts in zip(ids, real, strict=True)]


def plainly(passes: list[Seen], heavy: int, recent: int, settings: H2OSettings) -> list[list[int]]:
    """The same choice by loops over single queries."""
    tokens, worth = passes[-1].keys.shape[1], list[list[float]]()
    for head in range(KV_HEADS):
        paid, could = [0.0] * tokens, [0.0] * tokens
        for seen in passes:
            first = seen.keys.shape[1] - seen.new
            for row in range(GROUP * seen.new):
                upto = first + row % seen.new + 1
                weights = (seen.keys[head, :upto] @ seen.queries[head, row] * seen.scale).softmax(0)
                left = 0.5 ** ((tokens - upto) / settings.fade) if settings.fade else 1.0
                for token, weight in enumerate(weights.tolist()):
                    if settings.pay == "output":
                        weight *= float(seen.values[head, token].norm())
                    paid[token] += weight**settings.power * left
                    could[token] += left
        if settings.score == "mean":
            paid = [value / queries for value, queries in zip(paid, could, strict=True)]
        worth.append(paid)
    ranked = sorted(((head, token) for head in range(KV_HEADS) for token in range(tokens - recent)), key=lambda at: -worth[at[0]][at[1]])
    if settings.heads == "own":
        ranked = [at for head in range(KV_HEADS) for at in [one for one in ranked if one[0] == head][:heavy]]
    best = ranked[: heavy * KV_HEADS]
    return [sorted(token for at, token in best if at == head) + list(range(tokens - recent, tokens)) for head in range(KV_HEADS)]


@pytest.mark.parametrize("score", ["sum", "mean"])
@pytest.mark.parametrize(("power", "fade"), [(1, 0), (2, 0), (1, 3), (2, 256)])
@pytest.mark.parametrize(("pay", "heads"), [("weight", "own"), ("output", "own"), ("output", "shared")])
def test_keep_is_the_heaviest_and_the_most_recent(score: Score, power: int, fade: int, pay: Pay, heads: Heads) -> None:
    """By single queries, in chunks of any size; payments count by their power and fade with each token."""
    settings = H2OSettings(budget=9, heavy=0.7, score=score, power=power, fade=fade, pay=pay, heads=heads)
    passes = chunks([5, 1, 9, 3], seed=1)
    h2o = H2O(settings)
    for seen in passes:
        h2o.update(0, seen)
    h2o.settle(18)
    found = kept(h2o, 18)
    assert found == plainly(passes, heavy=6, recent=3, settings=settings)
    assert sum(map(len, found)) == 9 * KV_HEADS
    assert (len(found[0]) == len(found[1])) is (heads == "own")


def test_each_setting_keeps_other_tokens() -> None:
    """They are not there for nothing: each changes the choice."""
    passes = chunks([5, 1, 9, 3], seed=1)
    published = H2OSettings(power=1, fade=0, pay="weight", heads="own")
    changes: list[dict[str, Any]] = [{"power": 2}, {"fade": 3}, {"pay": "output"}, {"pay": "output", "heads": "shared"}]
    ways = [published, *(replace(published, **one) for one in changes)]
    kept_sets = [plainly(passes, heavy=6, recent=3, settings=way) for way in ways]
    assert all(one != other for at, one in enumerate(kept_sets) for other in kept_sets[:at])


def test_accounts_fade_while_tokens_are_generated() -> None:
    """Who was heavy long ago gives way to who is wanted now."""
    keys = torch.zeros(1, 8, 2)
    keys[0, 1, 0] = keys[0, 2, 1] = 9.0
    for fade, stays in ((0, 1), (2, 2)):
        h2o = H2O(H2OSettings(budget=3, heavy=0.34, fade=fade, pay="weight"))
        h2o.update(0, Seen(torch.tensor([9.0, 0.0]).expand(1, 8, 2), keys, keys, 8, 1.0))
        h2o.update(0, Seen(torch.tensor([0.0, 9.0]).expand(1, 4, 2), *(torch.cat((keys, keys[:, 4:]), dim=1),) * 2, 4, 1.0))
        h2o.settle(12)
        assert kept(h2o, 12) == [[stays, 10, 11]]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    budget=st.integers(2, 30),
    heavy=st.floats(0, 1),
    steps=st.lists(st.integers(1, 3), max_size=8),
    heads=st.sampled_from(("own", "shared")),
)
def test_exactly_the_budget_is_kept_and_who_left_stays_away(seed: int, budget: int, heavy: float, steps: list[int], heads: Heads) -> None:
    """At every step the budget, of each head or of both together, ascending, the most recent among them, and nobody returns."""
    draw = torch.Generator().manual_seed(seed)

    def seen(read: int, n: int) -> Seen:
        queries, keys, values = (torch.randn(KV_HEADS, rows, DIM, generator=draw) for rows in (GROUP * n, read, read))
        return Seen(queries, keys, values, n, 0.5)

    h2o = H2O(H2OSettings(budget=budget, heavy=heavy, heads=heads))
    h2o.update(0, seen(16, 16))
    h2o.settle(16)
    past, before = 16, [set(range(16))] * KV_HEADS
    recent = budget - int(budget * heavy)
    for n in [*steps, 0]:
        ids = h2o.keep(0, past).ids
        now = [list(range(past))] * KV_HEADS if ids is None else kept(h2o, past)
        assert sum(map(len, now)) == KV_HEADS * min(budget, past)
        for row, earlier in zip(now, before, strict=True):
            assert heads == "shared" or len(row) == min(budget, past)
            assert row == sorted(set(row))
            assert set(row) <= earlier
            assert set(row) >= set(range(max(0, past - recent), past))
        if n:
            h2o.update(0, seen((past if ids is None else ids.shape[1]) + n, n))
            before = [set(row) | set(range(past, past + n)) for row in now]
            past += n


def test_an_evicted_token_is_the_lightest_outside_the_recent() -> None:
    """One token a step leaves: here the one that no query looks at."""
    keys = torch.zeros(1, 4, 2)
    keys[0, :, 0] = torch.tensor([3.0, -9.0, 3.0, 3.0])
    looks = torch.tensor([1.0, 0.0])
    h2o = H2O(H2OSettings(budget=4, heavy=0.5, pay="weight"))
    h2o.update(0, Seen(looks.expand(1, 4, 2), keys, keys, 4, 1.0))
    h2o.settle(4)
    assert h2o.keep(0, 4).ids is None
    h2o.update(0, Seen(looks.expand(1, 1, 2), *(torch.cat((keys, keys[:, :1]), dim=1),) * 2, 1, 1.0))
    assert kept(h2o, 5) == [[0, 2, 3, 4]]


def test_h2o_refuses_a_prompt_whose_queries_it_has_not_seen() -> None:
    """Tokens that were loaded have no account; a choice without them would be another technique."""
    loaded = Seen(torch.randn(1, 2, DIM), torch.randn(1, 10, DIM), torch.randn(1, 10, DIM), 2, 1.0)
    h2o = H2O(H2OSettings())
    assert h2o.traits.prompt_queries is None
    with pytest.raises(LocalError, match="whole prompt"):
        h2o.update(0, loaded)
    h2o.settle(10)
    with pytest.raises(LocalError, match="whole prompt"):
        h2o.keep(1, 10)
