"""Placement: stable, fair by weight, minimal movement."""

from collections import Counter
from hashlib import sha256
from math import log

import pytest
import xxhash

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.placement import NodeWeight, assign, blocks_per_extent, extent_heads, owner, owners, ranked

HEADS = [sha256(b"head%d" % i).digest() for i in range(20_000)]
NODES = [NodeWeight(f"{i:032x}", 1.0) for i in range(1, 6)]
MASK = 2**64 - 1
GOLDEN = [("beta", "delta", "alpha", "gamma"), ("beta", "delta", "alpha", "gamma"), ("gamma", "delta", "beta", "alpha")]
GOLDEN_EDGES = ["alpha", "alpha"]


def reference_order(head: bytes, nodes: list[NodeWeight]) -> tuple[str, ...]:
    """The specification again, in plain integers and floats."""

    def arrival(node: NodeWeight) -> float:
        x = xxhash.xxh3_64_intdigest(head) ^ xxhash.xxh3_64_intdigest(node.id.encode())
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x ^= x >> 33
            x = x * factor & MASK
        x ^= x >> 33
        return -log(((x >> 11) + 0.5) * 2.0**-53) / node.weight

    return tuple(node.id for node in sorted(nodes, key=lambda node: (arrival(node), node.id)))


def test_ranked_golden_vectors_never_change() -> None:
    """Ownership is computed on every machine; a changed order would lose every block of a running cluster."""
    nodes = [NodeWeight("alpha", 1.0), NodeWeight("beta", 2.0), NodeWeight("gamma", 0.5), NodeWeight("delta", 1.0)]
    orders = [ranked(sha256(text).digest(), nodes) for text in (b"", b"kvpool", b"prefix")]
    assert orders == GOLDEN
    assert [ranked(b"\x00" * 32, nodes)[0], ranked(b"\xff" * 32, nodes)[0]] == GOLDEN_EDGES


def test_ranked_equals_the_plain_specification() -> None:
    """The vectorised form computes what the essay says."""
    nodes = [NodeWeight(node.id, weight) for node, weight in zip(NODES, (1.0, 2.0, 0.25, 7.5, 1.0), strict=True)]
    for head in HEADS[:500]:
        assert ranked(head, nodes) == reference_order(head, nodes)


def test_owner_is_the_first_ranked_whatever_the_order_of_nodes() -> None:
    """Two members list the cluster in different orders and must agree."""
    for head in HEADS[:200]:
        first = ranked(head, NODES)[0]
        assert owner(head, NODES) == owner(head, NODES[::-1]) == first
    assert owners(HEADS[:200], NODES) == [owner(head, NODES) for head in HEADS[:200]]
    assert ranked(HEADS[0], NODES, 2) == ranked(HEADS[0], NODES)[:2]


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, 2, 3, 4, 10), (0.5, 0.5, 8, 1, 1)])
def test_owners_weights_are_respected(weights: tuple[float, ...]) -> None:
    """A node with twice the memory takes twice the blocks (within 4 sigma)."""
    nodes = [NodeWeight(node.id, weight) for node, weight in zip(NODES, weights, strict=True)]
    counts = Counter(owners(HEADS, nodes))
    for node in nodes:
        share = node.weight / sum(weights)
        assert abs(counts[node.id] - share * len(HEADS)) < 4 * (len(HEADS) * share * (1 - share)) ** 0.5


def test_owners_join_moves_only_the_new_nodes_share() -> None:
    """A join must not reshuffle what others hold."""
    before = owners(HEADS, NODES)
    joined = NodeWeight(f"{99:032x}", 2.0)
    after = owners(HEADS, [*NODES, joined])
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {joined.id}
    share = 2 / 7
    assert abs(len(moved) / len(HEADS) - share) < 0.02


def test_owners_leave_moves_only_the_lost_nodes_share_to_the_second_rank() -> None:
    """A crash costs 1/N of the blocks, and replicas are where readers look next."""
    lost = NODES[2]
    rest = [node for node in NODES if node is not lost]
    for head in HEADS[:2000]:
        order = ranked(head, NODES)
        assert owner(head, rest) == (order[1] if order[0] == lost.id else order[0])
    assert ranked(HEADS[0], rest) == tuple(i for i in ranked(HEADS[0], NODES) if i != lost.id)


def test_extent_heads_group_consecutive_blocks() -> None:
    """All blocks of an extent carry the key of its first block, the last extent may be short."""
    keys = [BlockKey(sha256(b"%d" % i).digest()) for i in range(70)]
    heads = extent_heads(keys, 32)
    assert heads == [keys[0]] * 32 + [keys[32]] * 32 + [keys[64]] * 6
    assert assign(keys, 32, NODES) == [owner(head, NODES) for head in heads]
    assert extent_heads([], 32) == [] == assign([], 32, NODES)


def test_blocks_per_extent_covers_small_and_large_blocks() -> None:
    """512 tokens whatever the block size; a block larger than an extent is its own."""
    assert [blocks_per_extent(n) for n in (1, 16, 100, 512, 1024)] == [512, 32, 5, 1, 1]
    with pytest.raises(ConfigError):
        blocks_per_extent(0)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "no pool node"),
        ([NodeWeight("a", 1.0), NodeWeight("a", 2.0)], "twice"),
        ([NodeWeight("a", 0.0)], "weight"),
        ([NodeWeight("a", float("nan"))], "weight"),
    ],
)
def test_owner_of_senseless_nodes_raises(nodes: list[NodeWeight], message: str) -> None:
    """An empty or contradictory view has no owner; the caller decides what to do without one."""
    with pytest.raises(ConfigError, match=message):
        owner(HEADS[0], nodes)


def test_assign_eight_thousand_blocks_touches_each_extent_once() -> None:
    """Mapping a long prompt is a vectorised pass over extents; its time is measured in `bench.core`."""
    keys = [BlockKey(head) for head in HEADS[:8192]]
    placed = assign(keys, 32, NODES)
    assert len(placed) == 8192
    assert placed[::32] == owners(keys[::32], NODES)
