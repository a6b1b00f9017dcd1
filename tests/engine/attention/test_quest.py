"""Quest: a bound that holds, and the pages it picks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.engine.attention.quest import PageBounds, Quest
from kvpool.engine.attention.settings import QuestSettings


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    page=st.integers(1, 7),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_no_key_scores_above_the_bound_of_its_page(seed: int, page: int, lengths: list[int]) -> None:
    """Exactly: whole numbers, so nothing is rounded. However the keys were appended, and tight for pages of one key."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randint(-50, 50, (2, sum(lengths), 6), generator=draw).float()
    queries = torch.randint(-50, 50, (2, 5, 6), generator=draw).float()
    first, *rest = torch.split(keys, lengths, dim=1)
    bounds = PageBounds(page, first)
    for more in rest:
        bounds.append(more)
    scores = queries @ keys.transpose(1, 2)
    bound = bounds.bound(queries)
    assert bounds.pages == -(-sum(lengths) // page)
    for number in range(bounds.pages):
        best = scores[:, :, number * page : (number + 1) * page].amax(-1)
        assert (bound[:, :, number] >= best).all()
        if page == 1:
            assert torch.equal(bound[:, :, number], best)


def one_hot(*pages: float) -> torch.Tensor:
    """Keys ``[1, 4 * pages, 2]``: the second of each page scores that much for the query (1, 0)."""
    keys = torch.zeros(1, 4 * len(pages), 2)
    keys[0, 1::4, 0] = torch.tensor(pages)
    return keys


LOOK = torch.tensor([[[1.0, 0.0]]])


def quest(keys: torch.Tensor, **changes: object) -> Quest:
    made = Quest(QuestSettings(**{"page": 4, "dense": 0, "budget": 12, **changes}))  # type: ignore[arg-type]
    made.append(0, keys)
    made.settle(keys.shape[1])
    return made


def test_query_reads_the_pages_with_the_highest_bounds_and_the_last() -> None:
    """Pages 1 and 4 hold the scores; 5 is the last, and not full."""
    ids = quest(one_hot(0, 9, 2, 1, 7, 0)[:, :-1]).query(0, LOOK).ids
    assert ids is not None
    assert ids.tolist() == [[4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22]]


def test_heads_of_a_group_share_the_pages() -> None:
    """A page is read when any of its query heads wants it."""
    keys = one_hot(0, 9, 2, 1, 7, 0)
    keys[0, 9, 1] = 20  # page 2, seen by the second head
    ids = quest(keys).query(0, torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])).ids
    assert ids is not None
    assert ids[0, ::4].tolist() == [4, 8, 20]


def test_dense_layers_and_short_contexts_read_everything() -> None:
    """So does a layer that was given nothing yet."""
    keys = one_hot(0, 9, 2, 1, 7, 0)
    assert quest(keys, dense=1).query(0, LOOK).ids is None
    assert quest(keys, budget=24).query(0, LOOK).ids is None
    assert quest(keys).query(1, LOOK).ids is None


def test_at_least_three_pages_are_read() -> None:
    """However small the budget."""
    ids = quest(one_hot(0, 9, 2, 1, 7, 0), budget=1e-3).query(0, LOOK).ids
    assert ids is not None
    assert ids.shape == (1, 12)
