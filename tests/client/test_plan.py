"""Planning of transfers."""

import hashlib

import pytest

from kvpool.block import BlockKey
from kvpool.client.plan import leading, placements, windows
from kvpool.policy.placement import PlacedNode, Placement
from kvpool.transport import Run

CHAIN = [BlockKey(hashlib.sha256(bytes([i])).digest()) for i in range(200)]
NODES = [PlacedNode(id=f"{i:032x}") for i in range(5)]


def where(first: int, count: int, *, copies: int = 2, extent_tokens: int = 512) -> list[Placement]:
    return placements(CHAIN, first, count, 16, extent_tokens, NODES, copies)


def test_place_of_a_block_is_the_same_whatever_part_of_the_chain_is_asked_for() -> None:
    """A writer pushes blocks one by one, a reader asks for all: both must look on the same nodes."""
    whole = where(0, len(CHAIN))
    assert len(set(whole)) > 1
    for first in (0, 1, 31, 32, 33, 100, 199):
        assert where(first, len(CHAIN) - first) == whole[first:]
        assert where(first, 1) == whole[first : first + 1]
    assert where(0, 0) == []


@pytest.mark.parametrize("extent_tokens", [512, 128])
def test_places_change_only_at_extent_borders(extent_tokens: int) -> None:
    """An extent (512 tokens: 32 blocks of 16) lives together, so that a request touches few nodes."""
    whole = where(0, len(CHAIN), extent_tokens=extent_tokens)
    changes = [i for i in range(1, len(whole)) if whole[i] != whole[i - 1]]
    assert changes
    assert all(i % (extent_tokens // 16) == 0 for i in changes)
    assert all(len(one.targets) == 2 for one in whole)


def test_leading_counts_until_the_first_hole() -> None:
    """KV behind a hole is useless to a causal model."""
    assert leading([]) == 0
    assert leading([1, 1, 0, 1]) == 2
    assert leading([(0, 1), (2, 3), None]) == 2


def test_windows_fit_the_buffer_and_merge_adjacent_frames_of_one_lease() -> None:
    """One transfer for what lies together, and never more bytes than the buffer holds."""
    pieces = [(7, 100, ((0, 0),)), (8, 100, ((0, 100),)), (9, 100, ((1, 0),)), (10, 100, ((0, 200),))]
    first, second = windows(pieces, 300)
    assert first.spots == ((7, 0, 100), (8, 100, 100), (9, 200, 100))
    assert first.leases == ((0,), (0,), (1,))
    assert first.runs == {0: (Run(0, 200, 0),), 1: (Run(0, 100, 200),)}
    assert second.runs == {0: (Run(200, 100, 0),)}


def test_copies_of_a_block_share_its_bytes_in_the_buffer() -> None:
    """A block is stamped once and written from there to all of its nodes."""
    (window,) = windows([(0, 100, ((0, 0), (1, 700))), (1, 100, ((1, 800),))], 300)
    assert window.leases == ((0, 1), (1,))
    assert window.runs == {0: (Run(0, 100, 0),), 1: (Run(700, 200, 0),)}


def test_window_takes_one_frame_larger_than_the_budget() -> None:
    """A frame is never cut; the staging buffer is made large enough for one."""
    cut = windows([(0, 500, ((0, 0),)), (1, 10, ((0, 500),))], 300)
    assert [w.spots for w in cut] == [((0, 0, 500),), ((1, 0, 10),)]
