"""What a token is worth to a query, and who stays for it."""

import pytest
import torch

from kvpool.engine.attention.settings import Heads
from kvpool.engine.attention.worth import packed, payments, worthiest


def test_a_payment_is_the_length_of_what_the_token_adds() -> None:
    """Weight times value, to a power; or the weight."""
    draw = torch.Generator().manual_seed(5)
    weights = torch.randn(2, 6, 9, generator=draw).softmax(-1)
    values = torch.randn(2, 9, 4, generator=draw)
    added = weights[..., None] * values[:, None]
    for power in (1, 2, 3):
        torch.testing.assert_close(payments(weights, values, power, "output"), added.norm(dim=-1) ** power)
        assert payments(weights, values, power, "weight").equal(weights**power)


@pytest.mark.parametrize(("heads", "staying"), [("own", [[0, 2], [1, 2]]), ("shared", [[2], [0, 1, 2]])])
def test_heads_that_share_a_budget_get_what_their_tokens_are_worth(heads: Heads, staying: list[list[int]]) -> None:
    """As many in all; rows are filled up to the longest."""
    worth = torch.tensor([[2.0, 1.0, 9.0], [3.0, 8.0, 4.0]])
    at, real = packed(worthiest(worth, 2, heads))
    assert [row[counts].tolist() for row, counts in zip(at, real, strict=True)] == staying
    assert at.shape[1] == max(map(len, staying))
