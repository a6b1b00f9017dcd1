"""SnapKV: the end of the prompt votes once."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpool.engine.attention.settings import SnapKVSettings
from kvpool.engine.attention.snapkv import SnapKV
from kvpool.engine.attention.technique import Seen
from kvpool.errors import LocalError

KV_HEADS, GROUP, DIM, TOKENS = 2, 2, 4, 30


def prompt(lengths: list[int]) -> list[Seen]:
    """One random prompt, in passes of these lengths."""
    draw = torch.Generator().manual_seed(7)
    keys = torch.randn(KV_HEADS, TOKENS, DIM, generator=draw)
    queries = torch.randn(KV_HEADS, GROUP, TOKENS, DIM, generator=draw)
    values = torch.tensor([3.0, 1.0])[:, None, None] * torch.randn(KV_HEADS, TOKENS, DIM, generator=draw)
    out, end = [], TOKENS - sum(lengths)
    for n in lengths:
        end += n
        out.append(Seen(queries[:, :, end - n : end].reshape(KV_HEADS, GROUP * n, DIM), keys[:, :end], values[:, :end], n, 0.5))
    return out


def choice(lengths: list[int], settings: SnapKVSettings) -> list[list[int]]:
    snapkv = SnapKV(settings)
    for seen in prompt(lengths):
        snapkv.update(0, seen)
    snapkv.settle(TOKENS)
    return kept(snapkv, TOKENS)


def kept(snapkv: SnapKV, past: int) -> list[list[int]]:
    """Per head, without what only fills it up."""
    ids, real, *_ = snapkv.keep(0, past)
    assert ids is not None
    assert real is not None
    return [row[counts].tolist() for row, counts in zip(ids, real, strict=True)]


def plainly(settings: SnapKVSettings) -> list[list[int]]:
    """The same choice by loops."""
    (seen,) = prompt([TOKENS])
    recent, reach = int(settings.budget * settings.recent), settings.kernel // 2
    older, worth = TOKENS - recent, dict[tuple[int, int], float]()
    for head in range(KV_HEADS):
        votes = torch.zeros(TOKENS)
        for row in range(GROUP * TOKENS):
            token = row % TOKENS
            if token >= TOKENS - settings.window:
                paid = (seen.keys[head, : token + 1] @ seen.queries[head, row] * 0.5).softmax(0)
                if settings.pay == "output":
                    paid = paid * seen.values[head, : token + 1].norm(dim=1)
                votes[: token + 1] += paid**settings.power
        for i in range(older):
            worth[head, i] = sum(votes[j].item() for j in range(max(0, i - reach), min(older, i + reach + 1)))
    best, each = sorted(worth, key=lambda at: -worth[at]), int(settings.budget) - recent
    if settings.heads == "own":
        best = [at for head in range(KV_HEADS) for at in [one for one in best if one[0] == head][:each]]
    chosen = best[: each * KV_HEADS]
    return [sorted(i for at, i in chosen if at == head) + list(range(older, TOKENS)) for head in range(KV_HEADS)]


PUBLISHED = SnapKVSettings(budget=12, window=6, recent=0.5, kernel=3, power=1, pay="weight", heads="own")
WIDER = SnapKVSettings(budget=12, window=20, recent=0.25, kernel=1, power=2)


@pytest.mark.parametrize("settings", [PUBLISHED, WIDER], ids=str)
@pytest.mark.parametrize("lengths", [[30], [20, 10], [27, 3], [10, 17, 1, 2], [20]], ids=str)
def test_keep_is_what_the_window_looks_at(lengths: list[int], settings: SnapKVSettings) -> None:
    """Chunks don't matter, and only the window's queries are needed: the last case has the others loaded."""
    assert choice(lengths, settings) == plainly(settings)


@pytest.mark.parametrize(
    "change", [{"kernel": 1}, {"power": 2}, {"recent": 0.2}, {"window": 20}, {"pay": "output"}, {"heads": "shared"}], ids=str
)
def test_each_setting_keeps_another_set(change: dict[str, Any]) -> None:
    """None of them is there for nothing. Heads that share a budget differ where they don't pay in weights, which add up to one in each."""
    before = replace(PUBLISHED, pay="output") if "heads" in change else PUBLISHED
    changed = replace(before, **change)
    assert choice([30], changed) == plainly(changed) != plainly(before)


def test_a_prompt_shorter_than_the_window_votes_as_a_whole() -> None:
    """All of its queries are there, so nothing is missing."""
    assert choice([30], replace(WIDER, window=64)) == plainly(replace(WIDER, window=64))


def test_tokens_after_the_prompt_stay() -> None:
    """It decides once: the list grows by each new token."""
    snapkv = SnapKV(PUBLISHED)
    for seen in prompt([30]):
        snapkv.update(0, seen)
    snapkv.settle(TOKENS)
    first = kept(snapkv, TOKENS)
    snapkv.update(0, Seen(torch.randn(KV_HEADS, GROUP * 2, DIM), torch.randn(KV_HEADS, 14, DIM), torch.randn(KV_HEADS, 14, DIM), 2, 0.5))
    assert kept(snapkv, TOKENS + 2) == [[*row, 30, 31] for row in first]


def test_a_short_prompt_is_kept_whole() -> None:
    """What fits is not chosen from."""
    snapkv = SnapKV(SnapKVSettings(budget=30, window=32))
    for seen in prompt([30]):
        snapkv.update(0, seen)
    snapkv.settle(TOKENS)
    assert snapkv.keep(0, TOKENS).ids is None


def test_snapkv_refuses_a_window_that_was_loaded() -> None:
    """The voters' queries must have been computed here."""
    snapkv = SnapKV(PUBLISHED)
    assert snapkv.traits.prompt_queries == 6
    for seen in prompt([5]):
        snapkv.update(0, seen)
    with pytest.raises(LocalError, match="last 6 tokens"):
        snapkv.settle(TOKENS)
    with pytest.raises(LocalError, match="not shown"):
        snapkv.keep(1, TOKENS)
