"""SnapKV: the end of the prompt votes once."""

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
    out, end = [], TOKENS - sum(lengths)
    for n in lengths:
        end += n
        out.append(Seen(queries[:, :, end - n : end].reshape(KV_HEADS, GROUP * n, DIM), keys[:, :end], n, 0.5))
    return out


def choice(lengths: list[int], settings: SnapKVSettings) -> list[list[int]]:
    snapkv = SnapKV(settings)
    for seen in prompt(lengths):
        snapkv.update(0, seen)
    snapkv.settle(TOKENS)
    ids = snapkv.keep(0, TOKENS).ids
    assert ids is not None
    result: list[list[int]] = ids.tolist()
    return result


def plainly(budget: int, window: int, kernel: int) -> list[list[int]]:
    """The same choice by loops."""
    (seen,) = prompt([TOKENS])
    before, out = TOKENS - window, []
    for head in range(KV_HEADS):
        votes = torch.zeros(before)
        for row in range(GROUP * TOKENS):
            token = row % TOKENS
            if token >= before:
                votes += (seen.keys[head, : token + 1] @ seen.queries[head, row] * 0.5).softmax(0)[:before]
        reach = kernel // 2
        pooled = [sum(votes[j].item() for j in range(max(0, i - reach), min(before, i + reach + 1))) for i in range(before)]
        chosen = sorted(range(before), key=lambda i: -pooled[i])[: budget - window]
        out.append(sorted(chosen) + list(range(before, TOKENS)))
    return out


@pytest.mark.parametrize("lengths", [[30], [20, 10], [27, 3], [10, 17, 1, 2], [6]], ids=str)
def test_keep_is_what_the_window_looks_at(lengths: list[int]) -> None:
    """Chunks don't matter, and only the window's queries are needed: the last case has the others loaded."""
    assert choice(lengths, SnapKVSettings(budget=12, window=6, kernel=3)) == plainly(12, 6, 3)


def test_pooling_keeps_neighbours() -> None:
    """Without it another set is kept."""
    assert choice([30], SnapKVSettings(budget=12, window=6, kernel=1)) == plainly(12, 6, 1)
    assert plainly(12, 6, 1) != plainly(12, 6, 3)


def test_tokens_after_the_prompt_stay() -> None:
    """It decides once: the list grows by each new token."""
    snapkv = SnapKV(SnapKVSettings(budget=12, window=6))
    for seen in prompt([30]):
        snapkv.update(0, seen)
    snapkv.settle(TOKENS)
    first = snapkv.keep(0, TOKENS).ids
    snapkv.update(0, Seen(torch.randn(KV_HEADS, GROUP * 2, DIM), torch.randn(KV_HEADS, 14, DIM), 2, 0.5))
    second = snapkv.keep(0, TOKENS + 2).ids
    assert first is not None
    assert second is not None
    assert second.tolist() == [[*row, 30, 31] for row in first.tolist()]


def test_a_short_prompt_is_kept_whole() -> None:
    """A budget never cuts into the window, and what fits is not chosen from."""
    snapkv = SnapKV(SnapKVSettings(budget=0.25, window=32))
    for seen in prompt([30]):
        snapkv.update(0, seen)
    snapkv.settle(TOKENS)
    assert snapkv.keep(0, TOKENS).ids is None


def test_snapkv_refuses_a_window_that_was_loaded() -> None:
    """The voters' queries must have been computed here."""
    snapkv = SnapKV(SnapKVSettings(budget=12, window=6))
    assert snapkv.traits.prompt_queries == 6
    for seen in prompt([5]):
        snapkv.update(0, seen)
    with pytest.raises(LocalError, match="last 6 tokens"):
        snapkv.settle(TOKENS)
    with pytest.raises(LocalError, match="not shown"):
        snapkv.keep(1, TOKENS)
