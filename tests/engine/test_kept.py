"""Which of the kept blocks goes next: the one that costs least to have again, as far as has been seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.block import BlockKey
from kvpool.engine.paged.kept import Kept

TOKENS = 16


def key_of(block: int) -> BlockKey:
    return BlockKey(block.to_bytes(32, "big"))


def give_up(kept: Kept) -> int:
    """What goes next, gone."""
    block = kept.first()
    kept.left(block, key_of(block), TOKENS, 0)
    return block


def filled() -> Kept:
    """Twenty blocks of each kind by turns: even ones are in the pool too, and a load costs a tenth of computing."""
    kept = Kept(lambda: 0.1)
    for block in range(40):
        kept.put(block, pooled=block % 2 == 0)
    return kept


def test_block_that_only_this_worker_has_is_kept_when_both_kinds_come_back() -> None:
    """All that leaves is asked for again: loading costs a tenth, so nearly all that goes is what the pool has."""
    kept, went = filled(), [0, 0]
    for _ in range(400):
        block = give_up(kept)
        went[block % 2] += 1
        kept.wanted([key_of(block)])
        kept.put(block, pooled=block % 2 == 0)
    assert went[0] > 5 * went[1] > 0


def test_kind_that_nobody_asks_for_goes_first_though_it_costs_more() -> None:
    """What counts is cost times demand."""
    kept, went = filled(), [0, 0]
    for number in range(400):
        block = give_up(kept)
        went[block % 2] += 1
        if block % 2 == 0:
            kept.wanted([key_of(block)])
        kept.put(block if block % 2 == 0 else 1001 + 2 * number, pooled=block % 2 == 0)
    assert went[1] > 3 * went[0]


def test_price_is_that_of_what_goes_next() -> None:
    """0 while nothing that left was missed; then tokens to compute again for each that comes, more for deeper ones."""
    prices = list[float]()
    for depth in (0, 262_144):
        kept = Kept()
        for block in range(8):
            kept.put(block, pooled=False)
        assert kept.price == 0
        for _ in range(4):
            kept.left(block := kept.first(), key_of(block), TOKENS, depth)
        assert kept.price == 0
        kept.wanted([key_of(0), key_of(1), key_of(99)])
        prices.append(kept.price)
    assert prices[0] == pytest.approx(0.5, rel=0.7)
    assert prices[1] == pytest.approx(2 * prices[0])


def test_loading_never_costs_more_than_computing() -> None:
    """A pool slower than this worker's own computing isn't asked."""
    kept = Kept(lambda: 7.0)
    for block in range(2):
        kept.put(block, pooled=True)
    give_up(kept)
    kept.wanted([key_of(0)])
    assert 0 < kept.price <= 1


@given(st.lists(st.tuples(st.sampled_from(["put", "take", "left", "wanted"]), st.integers(0, 9), st.booleans()), max_size=60))
def test_who_goes_is_the_least_recently_used_of_its_kind(steps: list[tuple[str, int, bool]]) -> None:
    """Against two lists, whatever happens: nobody is lost, named twice, or passed over by a younger one of the same kind."""
    kept, order = Kept(), dict[bool, list[int]]({True: [], False: []})
    for what, block, pooled in steps:
        here = [block in blocks for blocks in order.values()]
        if what == "put" and not any(here):
            kept.put(block, pooled=pooled)
            order[pooled].append(block)
        elif what == "take" and any(here):
            kept.take(block)
            order[here[0]].remove(block)
        elif what == "left" and len(kept):
            costs = {kind: kept._cost(kind) for kind, blocks in order.items() if blocks}
            first = kept.first()
            kind = first in order[True]
            assert order[kind].pop(0) == first
            assert costs[kind] == min(costs.values()) == kept.price
            kept.left(first, key_of(first), TOKENS, 0)
        elif what == "wanted":
            kept.wanted([key_of(block)])
        assert len(kept) == sum(map(len, order.values()))
        assert all((block in kept) == any(block in blocks for blocks in order.values()) for block in range(10))
        assert kept.price >= 0
