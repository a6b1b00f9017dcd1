"""Planning of transfers."""

import hashlib

from kvpool.block import BlockKey
from kvpool.client.plan import by_node, leading, owners_of, windows
from kvpool.policy.placement import PlacedNode
from kvpool.transport import Run

CHAIN = [BlockKey(hashlib.sha256(bytes([i])).digest()) for i in range(200)]
NODES = [PlacedNode(id=f"{i:032x}") for i in range(5)]


def test_owner_of_a_block_is_the_same_whatever_part_of_the_chain_is_asked_for() -> None:
    """A writer pushes blocks one by one, a reader asks for all: both must look on the same node."""
    whole = owners_of(CHAIN, 0, len(CHAIN), 16, NODES)
    assert len(set(whole)) > 1
    for first in (0, 1, 31, 32, 33, 100, 199):
        assert owners_of(CHAIN, first, len(CHAIN) - first, 16, NODES) == whole[first:]
        assert owners_of(CHAIN, first, 1, 16, NODES) == whole[first : first + 1]


def test_owners_change_only_at_extent_borders() -> None:
    """An extent (512 tokens: 32 blocks of 16) lives on one node, so that a request touches few nodes."""
    whole = owners_of(CHAIN, 0, len(CHAIN), 16, NODES)
    changes = [i for i in range(1, len(whole)) if whole[i] != whole[i - 1]]
    assert changes
    assert all(i % 32 == 0 for i in changes)


def test_by_node_keeps_positions_in_order() -> None:
    """Positions are how answers find their way back to blocks."""
    assert by_node(["b", "a", "b"]) == {"b": [0, 2], "a": [1]}


def test_leading_counts_until_the_first_hole() -> None:
    """KV behind a hole is useless to a causal model."""
    assert leading([]) == 0
    assert leading([1, 1, 0, 1]) == 2
    assert leading([(0, 1), (2, 3), None]) == 2


def test_windows_fit_the_buffer_and_merge_adjacent_frames_of_one_node() -> None:
    """One transfer for what lies together, and never more bytes than the buffer holds."""
    pieces = [(7, "a", 0, 100), (8, "a", 100, 100), (9, "b", 0, 100), (10, "a", 200, 100)]
    first, second = windows(pieces, 300)
    assert first.spots == ((7, 0, 100), (8, 100, 100), (9, 200, 100))
    assert first.nodes == ("a", "a", "b")
    assert first.runs == {"a": (Run(0, 200, 0),), "b": (Run(0, 100, 200),)}
    assert second.runs == {"a": (Run(200, 100, 0),)}


def test_window_takes_one_frame_larger_than_the_budget() -> None:
    """A frame is never cut; the staging buffer is made large enough for one."""
    assert [w.spots for w in windows([(0, "a", 0, 500), (1, "a", 500, 10)], 300)] == [((0, 0, 500),), ((1, 0, 10),)]
