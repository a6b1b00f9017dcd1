"""Keys grow with the tokens and equal those computed at once."""

import pytest

from kvpool.block import chain_keys
from kvpool.engine.chain import Chain

ROOT = bytes(range(32))


@pytest.mark.parametrize("block_tokens", [1, 3, 16])
@pytest.mark.parametrize("start", [1, 2, 3, 20])
def test_append_gives_the_keys_of_the_whole(block_tokens: int, start: int) -> None:
    """A decode that grows a chain names its blocks as a later prefill of the same tokens will."""
    tokens = list(range(50))
    chain = Chain(ROOT, block_tokens, tokens[:start])
    for end in range(start, 50):
        assert len(chain) == end
        assert chain.keys == chain_keys(ROOT, tokens[:end], block_tokens)
        assert chain.with_tail() == chain_keys(ROOT, tokens[:end], block_tokens, tail=True)
        chain.append(tokens[end])


def test_counts_are_full_blocks_but_for_a_partial_last() -> None:
    """Only the trailing block may be short."""
    chain = Chain(ROOT, 4, range(10))
    assert chain.counts(0, 3) == [4, 4, 2]
    assert chain.counts(1, 2) == [4]
    assert chain.counts(2, 2) == []
