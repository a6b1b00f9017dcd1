"""The index says what a plain table of (holder, key, tier) would say, whatever is told in whatever order."""

from collections import defaultdict
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import BlockKey
from kvpool.policy.prefix import PrefixIndex
from kvpool.request.events import BELOW, BESIDE, DRAM

HOLDERS = ("a", "b", "c")


def chain(*turns: tuple[str, int]) -> list[BlockKey]:
    """Keys of a chain: each turn adds so many blocks of its own."""
    keys: list[BlockKey] = []
    for name, count in turns:
        for number in range(count):
            keys.append(BlockKey(sha256((keys[-1] if keys else b"") + name.encode() + number.to_bytes(2, "little")).digest()))
    return keys


TREE = [
    chain(("x", 300)),
    chain(("x", 130), ("y", 150)),
    chain(("x", 130), ("y", 20), ("z", 9)),
    chain(("x", 3), ("w", 140)),
    chain(("v", 5)),
]


class Table:
    """The plain model: bits of tiers by holder and key."""

    def __init__(self) -> None:
        self.bits: dict[str, dict[BlockKey, set[int]]] = defaultdict(lambda: defaultdict(set))

    def tiers(self, holder: str, keys: list[BlockKey]) -> tuple[int, int, int]:
        counts = [0, 0, 0]
        for key in keys:
            here = self.bits[holder].get(key)
            if not here:
                break
            counts[0 if BESIDE in here else 1 if DRAM in here else 2] += 1
        return counts[0], counts[1], counts[2]

    def together(self, holders: tuple[str, ...], keys: list[BlockKey]) -> int:
        return next((i for i, key in enumerate(keys) if not any(self.bits[h].get(key) for h in holders)), len(keys))


def check(index: PrefixIndex[str], table: Table) -> None:
    for keys in TREE:
        match = index.match(keys)
        wanted = {holder: table.tiers(holder, keys) for holder in HOLDERS}
        assert {holder: match.tiers(holder) for holder in HOLDERS} == wanted
        assert match.leading() == {holder: sum(counts) for holder, counts in wanted.items() if sum(counts)}
        assert match.blocks == table.together(HOLDERS, keys)
        assert match.together("a", "bc").blocks == match.blocks
        assert match.together("a", "c").blocks == table.together(("a", "c"), keys)
    for holder in HOLDERS:
        assert index.held(holder) == sum(bool(bits) for bits in table.bits[holder].values())


stretch = st.tuples(st.sampled_from(range(len(TREE))), st.integers(0, 299), st.integers(1, 200))
told = st.tuples(st.just("stored"), st.sampled_from(HOLDERS), stretch, st.sampled_from((DRAM, BESIDE, BELOW)), st.booleans(), st.booleans())
gone = st.tuples(st.just("removed"), st.sampled_from(HOLDERS), stretch, st.sampled_from((None, DRAM, BESIDE)), st.booleans(), st.booleans())
over = st.tuples(st.sampled_from(("cleared", "forget")), st.sampled_from(HOLDERS), stretch, st.none(), st.booleans(), st.booleans())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(told, told, gone, over), max_size=14))
def test_index_agrees_with_a_plain_table(
    steps: list[tuple[str, str, tuple[int, int, int], int | None, bool, bool]],
) -> None:
    """Stretches of chains come and go in any order, from the middle too: holes, late heads, tiers, holders that end and begin again."""
    index: PrefixIndex[str] = PrefixIndex()
    table = Table()
    for what, holder, (which, start, size), tier, flag, backwards in steps:
        keys = TREE[which][start : start + size]
        if what == "stored" and tier is not None:
            parent = TREE[which][start - 1] if flag and 0 < start <= len(TREE[which]) else None
            index.stored(holder, keys, tier, parent=parent, moved=backwards)
            for key in keys:
                table.bits[holder][key] = {tier} if backwards else table.bits[holder][key] | {tier}
        elif what == "removed":
            index.removed(holder, keys[::-1] if backwards else keys, tier)
            for key in keys:
                table.bits[holder][key] -= {tier} if tier else {DRAM, BESIDE, BELOW}
        else:
            getattr(index, what)(holder)
            table.bits.pop(holder, None)
        check(index, table)
    for holder in HOLDERS:
        index.forget(holder)
    assert len(index) == 0


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(40)), st.integers(0, 39), st.lists(st.integers(0, 3), min_size=40, max_size=40))
def test_blocks_may_be_told_of_one_by_one_in_any_order(order: list[int], known: int, branches: list[int]) -> None:
    """A snapshot comes in the order of a node's table, children before parents and chains mixed."""
    index: PrefixIndex[str] = PrefixIndex()
    table = Table()
    keys = TREE[0][110:150]
    for holder, tier in (("a", DRAM), ("b", BESIDE)):
        for i in order:
            if holder == "b" and i > known:
                continue
            chains = [keys, TREE[1][110:150], TREE[2][110:150], TREE[0][110:150]][branches[i]]
            index.stored(holder, chains[i : i + 1], tier, parent=chains[i - 1] if i else TREE[0][109], moved=True)
            table.bits[holder][chains[i]] = {tier}
    for which in TREE[:3]:
        match = index.match(which[110:150])
        assert {holder: match.tiers(holder) for holder in HOLDERS} == {h: table.tiers(h, which[110:150]) for h in HOLDERS}
    for holder in HOLDERS:
        assert index.held(holder) == len(table.bits[holder])
        index.forget(holder)
    assert len(index) == 0


def test_chain_told_of_backwards_becomes_whole() -> None:
    """Joining what follows keeps a match short: one stretch, however the blocks came."""
    index: PrefixIndex[str] = PrefixIndex()
    for i in reversed(range(100)):
        index.stored("a", TREE[0][i : i + 1], DRAM, parent=TREE[0][i - 1] if i else None)
    assert index.pieces() == 1
    index.stored("b", TREE[0][:50], DRAM)
    index.removed("a", TREE[0][30:100][::-1])
    assert index.match(TREE[0]).leading() == {"a": 30, "b": 50}
    assert len(index) == 50


def test_tiers_and_nearness_are_told_apart() -> None:
    """A router prices a block in the GPU, one in memory near or far, and one on a disk differently."""
    index: PrefixIndex[str] = PrefixIndex()
    keys = TREE[0][:10]
    index.stored("a", keys[:2], BESIDE)
    index.stored("a", keys[:4], DRAM)
    index.stored("b", keys[2:8], DRAM, parent=keys[1])
    index.stored("c", keys[:10], BELOW)
    match = index.match(keys)
    assert match.tiers("a") == (2, 2, 0)
    assert match.leading() == {"a": 4, "c": 10}
    reach = match.together(near=["a"], far=["b", "c"])
    assert reach == (10, 4, 0, 4, 0, 0, 2)
    assert match.together(near=["a"], far=["b", "c"], after=3) == (7, 1, 0, 4, 0, 0, 2)
    assert index.match(keys).together(near=["b"], far=["unknown"]).blocks == 0


def test_full_holder_forgets_tails_of_the_oldest_chain_first() -> None:
    """Memory is bounded for each holder, and what stays must still be a prefix."""
    index: PrefixIndex[str] = PrefixIndex(8)
    old, new = chain(("old", 6)), chain(("new", 4))
    for holder in ("a", "b"):
        index.stored(holder, old, DRAM)
    index.stored("a", new, DRAM)
    assert (index.match(new).of("a"), index.match(old).of("a"), index.held("a"), index.dropped) == (4, 4, 8, 2)
    assert index.match(old).of("b") == 6
    index.touch("a", old)
    index.stored("a", chain(("newest", 3)), DRAM)
    assert (index.match(new).of("a"), index.match(old).of("a")) == (1, 4)


def test_chain_longer_than_a_holder_may_have_keeps_its_head() -> None:
    """The tail of a chain is worth nothing alone."""
    index: PrefixIndex[str] = PrefixIndex(200)
    index.stored("a", TREE[0], DRAM)
    assert (index.match(TREE[0]).of("a"), index.held("a"), len(index)) == (200, 200, 200)


def test_holder_that_lies_loses_its_credit_and_regains_it_by_proof() -> None:
    """What a holder says is worth what requests found there; one that is new is believed."""
    index: PrefixIndex[str] = PrefixIndex()
    for _ in range(4):
        index.proved("a", 100, 0)
    assert index.credited("a", 160) == 10
    assert index.credited("b", 160) == 160
    index.proved("a", 100, 60)
    assert 10 < index.credited("a", 160) < 96
    for _ in range(40):
        index.proved("a", 100, 99)
    assert index.credited("a", 160) >= 150
    index.proved("a", 0, 0)
    index.forget("a")
    assert index.credit("a") == 1.0


def test_index_without_room_and_unknown_tiers_are_refused() -> None:
    """They could never answer."""
    with pytest.raises(ValueError, match="at least 1"):
        PrefixIndex(0)
    with pytest.raises(ValueError, match="tier"):
        PrefixIndex[str]().stored("a", TREE[4], 4)
