"""Placement: stable, fair by weight, minimal movement, spread over what fails together."""

from collections import Counter
from hashlib import sha256
from math import log

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.policy.placement import (
    NodeState,
    PlacedNode,
    Placement,
    blocks_per_extent,
    node_from_info,
    place,
    ranked,
    read_order,
    write_targets,
)

HEADS = [BlockKey(sha256(b"head%d" % i).digest()) for i in range(20_000)]
NODES = [PlacedNode(f"{i:032x}") for i in range(1, 6)]
MASK = 2**64 - 1
GOLDEN = [("beta", "delta", "alpha", "gamma"), ("beta", "delta", "alpha", "gamma"), ("gamma", "delta", "beta", "alpha")]
GOLDEN_EDGES = ["alpha", "alpha"]

J, A, D, Q = NodeState.JOINING, NodeState.ACTIVE, NodeState.DRAINING, NodeState.QUARANTINED
heads = st.binary(min_size=32, max_size=32).map(BlockKey)
weights = st.sampled_from([0.25, 1.0, 1.5, 8.0])
names = st.sampled_from(["", "x", "y", "z"])


def nodes_of(states: st.SearchStrategy[NodeState], *, least: int = 1) -> st.SearchStrategy[list[PlacedNode]]:
    """Up to eight nodes with any weights, in any domains."""
    fields = st.tuples(weights, states, names, names, names)
    rows = st.lists(fields, min_size=least, max_size=8)
    return rows.map(lambda some: [PlacedNode(f"{i:032x}", *row) for i, row in enumerate(some)])


def owners(nodes: list[PlacedNode]) -> list[str]:
    return [placement.targets[0] for placement in place(HEADS, 1, nodes, 1)]


def reference_order(head: bytes, nodes: list[PlacedNode]) -> list[PlacedNode]:
    """The ranking again, in plain integers and floats."""

    def arrival(node: PlacedNode) -> float:
        x = xxhash.xxh3_64_intdigest(head) ^ xxhash.xxh3_64_intdigest(node.id.encode())
        for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            x ^= x >> 33
            x = x * factor & MASK
        x ^= x >> 33
        return -log(((x >> 11) + 0.5) * 2.0**-53) / node.weight

    return sorted(nodes, key=lambda node: (arrival(node), node.id))


def reference_targets(head: bytes, nodes: list[PlacedNode], copies: int) -> tuple[str, ...]:
    """The spread again, one copy at a time as it is told: the next rank in a new zone, else a new rack, else a new host, else any."""
    rest, chosen = reference_order(head, nodes), list[PlacedNode]()
    while rest and len(chosen) < copies:
        kinds = [
            [n for n in rest if n.zone not in {c.zone for c in chosen}],
            [n for n in rest if (n.zone, n.rack) not in {(c.zone, c.rack) for c in chosen}],
            [n for n in rest if (n.zone, n.rack, n.host or n.id) not in {(c.zone, c.rack, c.host or c.id) for c in chosen}],
            rest,
        ]
        best = next(kind[0] for kind in kinds if kind)
        chosen.append(best)
        rest.remove(best)
    return tuple(node.id for node in chosen)


def test_ranked_golden_vectors_never_change() -> None:
    """Ownership is computed on every machine; a changed order would lose every block of a running cluster."""
    nodes = [PlacedNode("alpha", 1.0), PlacedNode("beta", 2.0), PlacedNode("gamma", 0.5), PlacedNode("delta", 1.0)]
    orders = [ranked(sha256(text).digest(), nodes) for text in (b"", b"kvpool", b"prefix")]
    assert orders == GOLDEN
    assert [ranked(b"\x00" * 32, nodes)[0], ranked(b"\xff" * 32, nodes)[0]] == GOLDEN_EDGES
    assert ranked(b"\x00" * 32, nodes, 2) == ranked(b"\x00" * 32, nodes)[:2]


def test_write_targets_golden_vectors_with_domains_never_change() -> None:
    """The same for where the copies go: beta leads, delta shares its zone, alpha its own, gamma is the third in the first."""
    nodes = [
        PlacedNode("alpha", 1.0, A, "h1", "r1", "east"),
        PlacedNode("beta", 2.0, A, "h2", "r1", "west"),
        PlacedNode("gamma", 0.5, A, "h3", "r2", "west"),
        PlacedNode("delta", 1.0, A, "h2", "r1", "west"),
    ]
    head = sha256(b"kvpool").digest()
    assert write_targets(head, nodes, 4) == ("beta", "alpha", "gamma", "delta")
    assert write_targets(head, nodes, 2) == ("beta", "alpha")


@given(heads, nodes_of(st.just(A)), st.integers(1, 9))
def test_write_targets_equal_the_plain_specification(head: BlockKey, nodes: list[PlacedNode], copies: int) -> None:
    """The vectorised form computes what the essay says, whatever the order in which a member lists the nodes."""
    expected = reference_targets(head, nodes, copies)
    assert write_targets(head, nodes, copies) == expected
    assert write_targets(head, nodes[::-1], copies) == expected
    assert ranked(head, nodes) == tuple(node.id for node in reference_order(head, nodes))
    assert expected[0] == ranked(head, nodes)[0]
    assert len(set(expected)) == len(expected) == min(copies, len(nodes))


@given(heads, nodes_of(st.just(A)), st.integers(1, 8))
def test_write_targets_with_more_copies_begin_with_those_of_fewer(head: BlockKey, nodes: list[PlacedNode], copies: int) -> None:
    """Replicas have an order: asking for one copy more adds one and moves none."""
    assert write_targets(head, nodes, copies + 1)[:copies] == write_targets(head, nodes, copies)


@given(heads, nodes_of(st.just(A)), st.integers(1, 8))
def test_write_targets_use_every_domain_before_one_twice(head: BlockKey, nodes: list[PlacedNode], copies: int) -> None:
    """A zone that burns takes no more copies with it than it must."""
    by_id = {node.id: node for node in nodes}
    zones = [by_id[node_id].zone for node_id in write_targets(head, nodes, copies)]
    assert len(set(zones)) == min(len(zones), len({node.zone for node in nodes}))


@given(heads, nodes_of(st.just(A), least=2), st.integers(1, 4), st.data())
def test_one_node_more_or_less_exchanges_at_most_one_target(
    head: BlockKey, nodes: list[PlacedNode], copies: int, data: st.DataObject
) -> None:
    """A join takes only for itself and a leave gives only what it had: no copy moves between two others, whatever the domains."""
    other = data.draw(st.sampled_from(nodes))
    rest = [node for node in nodes if node is not other]
    with_it, without = set(write_targets(head, nodes, copies)), set(write_targets(head, rest, copies))
    assert with_it - without <= {other.id}
    if other.id in with_it:
        assert len(without - with_it) == min(copies, len(rest)) - len(with_it - {other.id})
    else:
        assert write_targets(head, nodes, copies) == write_targets(head, rest, copies)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_join_moves_only_its_share(copies: int) -> None:
    """A sixth node takes a sixth of the first copies, and of the others as much, and takes it for itself."""
    joined = PlacedNode(f"{99:032x}")
    before, after = place(HEADS, 1, NODES, copies), place(HEADS, 1, [*NODES, joined], copies)
    for rank in range(copies):
        moved = [new.targets[rank] for old, new in zip(before, after, strict=True) if old.targets[rank] != new.targets[rank]]
        assert len(moved) / len(HEADS) <= (rank + 1) * (1 / 6) + 0.02  # whoever it outranks moves down one place
    taken = [set(new.targets) - set(old.targets) for old, new in zip(before, after, strict=True)]
    assert set().union(*taken) == {joined.id}
    assert abs(sum(map(len, taken)) / (copies * len(HEADS)) - 1 / 6) < 0.02


def test_leave_gives_away_only_its_own_to_the_next_rank() -> None:
    """A crash costs 1/N of the blocks, and replicas are where readers look next."""
    lost = NODES[2]
    rest = [node for node in NODES if node is not lost]
    for old, new in zip(place(HEADS[:2000], 1, NODES, 3), place(HEADS[:2000], 1, rest, 2), strict=True):
        assert new.targets == tuple(i for i in old.targets if i != lost.id)[:2]


@pytest.mark.parametrize("weights", [(1, 1, 1, 1, 1), (1, 2, 3, 4, 10), (0.5, 0.5, 8, 1, 1)])
def test_weights_are_respected(weights: tuple[float, ...]) -> None:
    """A node with twice the memory takes twice the blocks (within 4 sigma)."""
    nodes = [PlacedNode(node.id, weight) for node, weight in zip(NODES, weights, strict=True)]
    counts = Counter(owners(nodes))
    for node in nodes:
        share = node.weight / sum(weights)
        assert abs(counts[node.id] - share * len(HEADS)) < 4 * (len(HEADS) * share * (1 - share)) ** 0.5


@given(heads, nodes_of(st.sampled_from(list(NodeState))), st.integers(1, 4))
def test_read_order_is_the_targets_then_those_before_the_change(head: BlockKey, nodes: list[PlacedNode], copies: int) -> None:
    """A reader finds a block on its new owner or on the one before, and asks nobody twice and nobody in quarantine."""
    now = reference_targets(head, [n for n in nodes if n.state in (A, J)], copies)
    before = reference_targets(head, [n for n in nodes if n.state in (A, D)], copies)
    order = read_order(head, nodes, copies)
    assert write_targets(head, nodes, copies) == now == order[: len(now)]
    assert set(order) == {*now, *before}
    assert [i for i in order if i in before and i not in now] == [i for i in before if i not in now]
    assert len(set(order)) == len(order)


@given(heads, nodes_of(st.just(A)), st.integers(1, 3), st.sampled_from([J, D]), st.data())
def test_read_order_covers_the_owners_before_and_after_one_change(
    head: BlockKey, nodes: list[PlacedNode], copies: int, state: NodeState, data: st.DataObject
) -> None:
    """While one node joins or drains, everybody who holds a copy is asked; afterwards nothing of the detour is left."""
    index = data.draw(st.integers(0, len(nodes) - 1))
    moving = [node._replace(state=state) if i == index else node for i, node in enumerate(nodes)]
    without = [node for i, node in enumerate(nodes) if i != index]
    order = read_order(head, moving, copies)
    assert set(order) >= {*write_targets(head, nodes, copies), *write_targets(head, without, copies)}
    assert len(order) <= copies + 1
    assert read_order(head, nodes, copies) == write_targets(head, nodes, copies)


def test_quarantined_node_is_left_out_and_the_rest_stays() -> None:
    """What it owned goes to the next ranks; nothing else moves."""
    ill = [node._replace(state=Q) if i == 1 else node for i, node in enumerate(NODES)]
    rest = [node for i, node in enumerate(NODES) if i != 1]
    assert place(HEADS[:500], 1, ill, 2) == place(HEADS[:500], 1, rest, 2)


def test_new_cluster_of_joining_nodes_takes_writes() -> None:
    """Before the first node is active, those on their way in are all there is."""
    nodes = [node._replace(state=J) for node in NODES]
    assert place(HEADS[:500], 1, nodes, 2) == place(HEADS[:500], 1, NODES, 2)


def test_place_without_a_node_to_write_to_has_no_targets() -> None:
    """Nobody there, or everybody on the way out: the caller counts a miss, and still reads what the draining hold."""
    assert place(HEADS[:2], 1, [], 2) == [Placement((), ())] * 2
    leaving = [PlacedNode("a", state=D), PlacedNode("b", state=Q)]
    assert place(HEADS[:1], 1, leaving, 2) == [Placement((), ("a",))]


def test_place_groups_consecutive_blocks() -> None:
    """One placement an extent; the last extent may be short."""
    keys = HEADS[:70]
    assert place(keys, 32, NODES, 2) == place([keys[0], keys[32], keys[64]], 1, NODES, 2)
    assert [p.targets for p in place(keys, 32, NODES, 2)] == [write_targets(keys[i], NODES, 2) for i in (0, 32, 64)]
    assert place([], 32, NODES, 2) == []


def test_blocks_per_extent_covers_small_and_large_blocks() -> None:
    """512 tokens whatever the block size; a block larger than an extent is its own."""
    assert [blocks_per_extent(n) for n in (1, 16, 100, 512, 1024)] == [512, 32, 5, 1, 1]
    with pytest.raises(ConfigError):
        blocks_per_extent(0)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([PlacedNode("a", 1.0), PlacedNode("a", 2.0)], "twice"),
        ([PlacedNode("a", 0.0)], "weight"),
        ([PlacedNode("a", float("nan"))], "weight"),
    ],
)
def test_place_of_senseless_nodes_raises(nodes: list[PlacedNode], message: str) -> None:
    """A contradictory view has no owner."""
    with pytest.raises(ConfigError, match=message):
        write_targets(HEADS[0], nodes, 1)


@pytest.mark.parametrize(("extent", "copies"), [(0, 1), (1, 0)])
def test_place_of_senseless_numbers_raises(extent: int, copies: int) -> None:
    """No copies and no extents are mistakes, not answers."""
    with pytest.raises(ConfigError, match="positive"):
        place(HEADS[:1], extent, NODES, copies)


def test_node_from_info_reads_what_a_member_says() -> None:
    """Everybody derives the same node from the same record."""
    info = {"weight": "7.5", "state": "draining", "host": "h", "rack": "r", "zone": "z", "incarnation": "3"}
    assert node_from_info("a", info) == PlacedNode("a", 7.5, D, "h", "r", "z")
    assert node_from_info("a", info, quarantined=True).state is Q


@pytest.mark.parametrize("info", [{}, {"weight": "lots", "state": "?"}, {"weight": "-1"}, {"weight": "nan"}, {"weight": "inf"}])
def test_node_from_info_has_a_default_for_what_is_missing_or_senseless(info: dict[str, str]) -> None:
    """A record of another version must not take the view down."""
    assert node_from_info("a", info) == PlacedNode("a", 1.0, A, "", "", "")
