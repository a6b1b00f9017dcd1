"""Partial attentions: whatever the parts, their sum is the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.engine.attention.partial import Partial, attend, causal, grouped, merge, ungrouped


def plain(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Softmax attention, written down."""
    return (queries @ keys.transpose(-1, -2) * scale).softmax(-1) @ values


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 40), rows=st.integers(1, 5), parts=st.integers(1, 6), size=st.floats(0.01, 30))
def test_merge_of_any_split_in_any_order_equals_full_attention(seed: int, tokens: int, rows: int, parts: int, size: float) -> None:
    """1e-6, for parts that are empty, single or large, and scores from flat to spiky."""
    draw = torch.Generator().manual_seed(seed)
    queries, keys, values = (torch.randn(2, count, 8, generator=draw) for count in (rows, tokens, tokens))
    queries *= size
    owner = torch.randint(parts, (tokens,), generator=draw)
    split = [attend(queries, keys[:, owner == part], values[:, owner == part], 0.35) for part in range(parts)]
    whole = attend(queries, keys, values, 0.35)
    together = merge(split)
    exact = plain(queries.double(), keys.double(), values.double(), 0.35)
    # Scores of size 30 are themselves rounded to 1e-5 of a nat in float32, whole or in parts.
    tolerance = 1e-6 * max(1.0, float(whole.lse.abs().max()))
    assert torch.allclose(together.out, whole.out, atol=tolerance, rtol=0)
    assert torch.allclose(together.lse, whole.lse, atol=tolerance, rtol=0)
    assert torch.allclose(together.out.double(), exact, atol=10 * tolerance, rtol=0)


def test_merge_ignores_parts_that_saw_nothing() -> None:
    """An empty part weighs nothing, and two of them make another, not NaN."""
    queries, keys, values = torch.randn(1, 3, 4), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    nothing = attend(queries, keys, values, 1.0, torch.zeros(3, 5, dtype=torch.bool))
    assert torch.equal(nothing.out, torch.zeros(1, 3, 4))
    some = attend(queries, keys, values, 1.0)
    for order in ((nothing, some), (some, nothing)):
        assert torch.allclose(merge(order).out, some.out, atol=1e-7)
    assert torch.equal(merge((nothing, nothing)).out, torch.zeros(1, 3, 4))


def test_merge_is_not_a_plain_sum_of_outputs() -> None:
    """Parts are weighed by what their queries found in them (a sum without a common normaliser is a known mistake)."""
    one = Partial(torch.tensor([[1.0]]), torch.tensor([0.0]))
    other = Partial(torch.tensor([[5.0]]), torch.log(torch.tensor([3.0])))
    assert merge((one, other)).out.item() == pytest.approx(4.0)
    assert merge((one, other)).lse.item() == pytest.approx(torch.log(torch.tensor(4.0)).item())


def test_grouped_puts_heads_that_share_a_kv_head_into_one_matrix() -> None:
    """Query head h belongs to KV head h // group; and back again."""
    queries = torch.arange(6 * 2 * 3).reshape(6, 2, 3)
    rows = grouped(queries, 3)
    assert torch.equal(rows[1], torch.cat((queries[2], queries[3])))
    assert torch.equal(ungrouped(rows, 6), queries)


def test_causal_repeats_for_each_head_of_a_group() -> None:
    """Row r is of token r mod n, which sees all before and up to itself."""
    expected = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal(4, 2, 2, torch.device("cpu")).int().tolist() == expected
