"""The convergence rule: from any placement, through any changes, every block comes to all of its targets and is never without a copy."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import BlockKey
from kvpool.policy.moves import Verdict, extent_head, judge
from kvpool.policy.placement import NodeState, PlacedNode, write_targets

ACTIVE, JOINING, DRAINING = NodeState.ACTIVE, NodeState.JOINING, NodeState.DRAINING
NEWS = 3
"""Steps until every node knows of a change."""


def head(index: int) -> BlockKey:
    return BlockKey(sha256(str(index).encode()).digest())


@dataclass
class World:
    """Nodes that hold extents; each knows the cluster as it was some steps ago."""

    copies: int
    rng: random.Random
    holds: dict[str, set[BlockKey]] = field(default_factory=dict)
    views: list[tuple[PlacedNode, ...]] = field(default_factory=list)
    luck: float = 1.0
    """How likely a push is to succeed."""
    pushed: int = 0
    step: int = 0
    changed: int = 0
    known_since: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Node -> (view it goes by, step since when)."""

    def change(self, *nodes: PlacedNode) -> None:
        self.views.append(tuple(sorted(nodes)))
        for node in nodes:
            self.holds.setdefault(node.id, set())
        self.changed = self.step

    def view(self, node: str) -> tuple[tuple[PlacedNode, ...], bool]:
        """What a node goes by, and whether that is old news. A change reaches it within `NEWS` steps."""
        latest = len(self.views) - 1
        at, since = self.known_since.get(node, (max(0, latest - 1), self.step))
        if at != latest and (self.step - self.changed >= NEWS or self.rng.random() < 0.3):
            at, since = latest, self.step
        self.known_since[node] = at, since
        return self.views[at], self.step - since > NEWS

    def ask(self, me: str, extent: BlockKey) -> tuple[Verdict, bool]:
        """What the rule says for one extent on one node, from what others hold now; whether that node waits for older news."""
        nodes, sure = self.view(me)
        states = {node.id: node.state for node in nodes}
        targets = write_targets(extent, nodes, self.copies)
        said = {node: extent in held for node, held in self.holds.items()}
        verdict = judge(me, targets, states, said.get, sure=sure)
        return verdict, not sure and judge(me, targets, states, said.get, sure=True).drop

    def act(self, me: str, extent: BlockKey, verdict: Verdict) -> None:
        """Do it, some time after it was said: others have acted meanwhile, and a push may fail."""
        for target in verdict.push:
            if extent not in self.holds[target] and self.rng.random() < self.luck:
                self.holds[target].add(extent)
                self.pushed += 1
        if verdict.drop:
            self.holds[me].discard(extent)

    def settle(self, extents: list[BlockKey], alive: Callable[[], None]) -> None:
        """Rounds of all nodes in any order until nothing is left to do."""
        for _ in range(100):
            work = [(node, extent) for node in self.holds for extent in self.holds[node]]
            self.rng.shuffle(work)
            busy = False
            while work:
                at_once = [work.pop() for _ in range(min(len(work), self.rng.choice((1, 2, 8, 64))))]
                said = [(node, extent, *self.ask(node, extent)) for node, extent in at_once if extent in self.holds[node]]
                for node, extent, verdict, waits in said:
                    self.act(node, extent, verdict)
                    busy = busy or bool(verdict.push) or verdict.drop or waits
                    alive()
            self.step += 1
            if not busy and self.step - self.changed > NEWS:
                return
        raise AssertionError("the nodes did not come to rest")


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 3), st.integers(1, 5))
def test_any_changes_end_with_every_block_on_all_its_targets_and_none_without_a_copy(seed: int, copies: int, start: int) -> None:
    """Joins, drains, other weights, crashes of fewer nodes than copies, in any order, some before the last one was digested."""
    rng = random.Random(seed)
    world, extents = World(copies, rng, luck=rng.choice((0.2, 1.0))), [head(index) for index in range(15)]
    nodes = {f"n{index}": PlacedNode(f"n{index}", weight=rng.choice((1.0, 1.0, 2.0))) for index in range(start)}
    world.change(*nodes.values())
    for extent in extents:  # from any placement: not where it belongs
        for _ in range(rng.randrange(1, 4)):
            world.holds[rng.choice(list(nodes))].add(extent)

    def alive() -> None:
        for extent in extents:
            assert any(extent in held for held in world.holds.values())

    world.settle(extents, alive)
    for number in range(rng.randrange(1, 6)):
        what = rng.choice(("join", "drain", "crash", "weigh"))
        if what == "join":
            fresh = PlacedNode(f"j{number}", state=JOINING)
            nodes[fresh.id] = fresh
        elif what == "drain" and len(nodes) > 1:
            gone = rng.choice(list(nodes))
            nodes[gone] = nodes[gone]._replace(state=DRAINING)
        elif what == "weigh":
            changed = rng.choice(list(nodes))
            nodes[changed] = nodes[changed]._replace(weight=rng.choice((0.1, 10.0)))
        elif what == "crash" and copies > 1 and len(nodes) > copies:
            world.settle(extents, alive)  # one crash at a time is what copies are for
            gone = rng.choice(list(nodes))
            del nodes[gone], world.holds[gone]
        if not any(node.state is not DRAINING for node in nodes.values()):
            nodes[f"k{number}"] = PlacedNode(f"k{number}")
        world.change(*nodes.values())
        if rng.random() < 0.7:
            world.settle(extents, alive)
        for name, node in list(nodes.items()):  # a drained node leaves, a joined one becomes active
            if node.state is DRAINING and rng.random() < 0.5:
                world.settle(extents, alive)
                del nodes[name], world.holds[name]
                world.change(*nodes.values())
            elif node.state is JOINING:
                nodes[name] = node._replace(state=ACTIVE)
                world.change(*nodes.values())
    world.settle(extents, alive)
    final = world.views[-1]
    for extent in extents:
        targets = set(write_targets(extent, final, copies))
        holders = {node.id for node in final if extent in world.holds[node.id]}
        drains = {node.id for node in final if node.state is DRAINING}
        assert targets <= holders <= targets | drains


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
@pytest.mark.parametrize("copies", [1, 2])
def test_join_moves_no_more_than_its_share(count: int, copies: int) -> None:
    """A node that joins n others is pushed at most 1/(n+1) of the copies and 2 %, and nothing else moves."""
    copies = min(copies, count)
    extents = [head(index) for index in range(2000)]
    before = [PlacedNode(f"{index:032x}") for index in range(count)]
    world = World(copies, random.Random(1))
    world.change(*before)
    for extent in extents:
        for node in write_targets(extent, before, copies):
            world.holds[node].add(extent)
    newcomer = PlacedNode("f" * 32)
    world.change(*before, newcomer)
    world.settle(extents, lambda: None)
    assert world.pushed == len(world.holds[newcomer.id])
    assert world.pushed <= (1 / (count + 1) + 0.02) * len(extents) * copies


def test_nobody_lets_go_on_young_news_or_for_a_node_that_joins_or_while_draining() -> None:
    """Each of the three would let the last copy go while somebody still counts on it."""
    everybody = {"a": ACTIVE, "b": ACTIVE}
    assert judge("a", ["b"], everybody, lambda _: True, sure=True).drop
    assert not judge("a", ["b"], everybody, lambda _: True, sure=False).drop
    assert not judge("a", ["b"], everybody, lambda _: False, sure=True).drop
    assert not judge("a", ["b"], everybody, lambda _: None, sure=True).drop
    assert not judge("a", ["b"], {"a": ACTIVE, "b": JOINING}, lambda _: True, sure=True).drop
    assert not judge("a", ["b"], {"a": DRAINING, "b": ACTIVE}, lambda _: True, sure=True).drop
    assert not judge("a", ["b"], {"b": ACTIVE}, lambda _: True, sure=True).drop
    assert not judge("a", ["a", "b"], everybody, lambda _: True, sure=True).drop
    assert not judge("a", [], {"a": ACTIVE}, lambda _: True, sure=True).drop


def test_first_active_holder_among_the_targets_pushes_and_others_leave_it_to_that_one() -> None:
    """Otherwise every copy would push the missing one."""
    states = {"a": ACTIVE, "b": ACTIVE, "c": ACTIVE}
    has = {"a": True, "b": True, "c": False}
    assert judge("a", ["a", "b", "c"], states, has.__getitem__, sure=True).push == ("c",)
    assert judge("b", ["a", "b", "c"], states, has.__getitem__, sure=True).push == ()
    assert judge("b", ["a", "b", "c"], {**states, "a": JOINING}, has.__getitem__, sure=True).push == ("c",)
    assert judge("b", ["a", "b", "c"], states, {**has, "a": None}.__getitem__, sure=True).push == ("c",)


Chain = dict[BlockKey, tuple[BlockKey | None, int]]


def chain_of(count: int, block_tokens: int) -> tuple[list[BlockKey], Chain]:
    keys = [head(index) for index in range(count)]
    return keys, {key: (keys[index - 1] if index else None, index * block_tokens) for index, key in enumerate(keys)}


@pytest.mark.parametrize(("block_tokens", "per_extent"), [(16, 32), (48, 10), (512, 1), (700, 1)])
def test_head_of_every_block_is_the_first_of_its_extent(block_tokens: int, per_extent: int) -> None:
    """Nodes must name extents as clients do (`placement.extent_heads`), whatever the size of a block."""
    keys, links = chain_of(80, block_tokens)
    known: dict[BlockKey, BlockKey | None] = {}
    for index in reversed(range(80)):
        assert extent_head(keys[index], links.get, 512, lambda _: None, known) == keys[index - index % per_extent]
    assert len(known) == 80


def test_head_is_found_without_the_chain_before_it() -> None:
    """The extent before lives on another node: a node that holds the second one alone still knows its head."""
    keys, links = chain_of(64, 16)
    second = {key: links[key] for key in keys[32:]}
    assert extent_head(keys[40], second.get, 512, lambda _: None, {}) == keys[32]
    assert extent_head(keys[32], {keys[32]: links[keys[32]]}.get, 512, lambda _: None, {}) == keys[32]
    odd, spans = chain_of(64, 48)
    alone = {odd[10]: spans[odd[10]]}  # at depth 480, which is no multiple of 512: its header must say that a block has 48
    assert extent_head(odd[10], alone.get, 512, lambda _: 48, {}) == odd[10]


def test_head_of_a_block_behind_a_gap_is_not_known() -> None:
    """Whatever named it otherwise would send it where no reader looks."""
    keys, links = chain_of(32, 16)
    del links[keys[7]]
    known: dict[BlockKey, BlockKey | None] = {}
    assert extent_head(keys[20], links.get, 512, lambda _: None, known) is None
    assert extent_head(keys[8], links.get, 512, lambda _: 16, known) is None
    assert extent_head(keys[6], links.get, 512, lambda _: None, known) == keys[0]
