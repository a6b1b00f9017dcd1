"""From presence bits to the answer of `kvpool lookup`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cli.prefix import report_prefix
from kvpool.errors import ProtocolError


def test_prefix_over_two_nodes_is_joined() -> None:
    """The pool holds a prefix when every block of it is on some node; gaps end it, later blocks are shown all the same."""
    report = report_prefix({"a": bytes([1, 1, 0, 0, 1]), "b": bytes([0, 1, 1, 0, 0])}, tokens=70, block_tokens=16)
    assert (report.cached_blocks, report.cached_tokens) == (3, 48)
    assert report.spans == {"a": ((0, 32), (64, 70)), "b": ((16, 48),)}
    assert report.blocks == {"a": 3, "b": 2}


def test_prefix_with_its_partial_tail_counts_tokens_not_blocks() -> None:
    """A cached tail of 6 tokens is 6 tokens."""
    report = report_prefix({"a": bytes([1] * 5)}, tokens=70, block_tokens=16)
    assert (report.cached_blocks, report.cached_tokens) == (5, 70)
    assert report.spans == {"a": ((0, 70),)}


@pytest.mark.parametrize("presence", [{}, {"a": b""}])
def test_prefix_of_nothing_is_nothing(presence: dict[str, bytes]) -> None:
    """No text, or no node, is no error."""
    report = report_prefix(presence, tokens=0, block_tokens=16)
    assert (report.cached_tokens, report.cached_blocks) == (0, 0)


def test_prefix_from_an_answer_of_the_wrong_length_is_refused() -> None:
    """A node that answers another question is not believed."""
    with pytest.raises(ProtocolError, match="node a"):
        report_prefix({"a": b"\1"}, tokens=17, block_tokens=16)


@given(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4))
def test_prefix_spans_cover_exactly_the_blocks_held(held: list[list[bool]]) -> None:
    """Spans are the blocks, only merged."""
    report = report_prefix({str(i): bytes(bits) for i, bits in enumerate(held)}, tokens=9 * 4 - 1, block_tokens=4)
    for i, bits in enumerate(held):
        tokens = {token for start, end in report.spans[str(i)] for token in range(start, end)}
        assert tokens == {token for token in range(9 * 4 - 1) if bits[token // 4]}
