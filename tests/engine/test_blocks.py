"""The block manager: nothing is lost, shared or overwritten by mistake, whatever happens in whatever order."""

import copy
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.block import BlockKey, chain_keys
from kvpool.engine.paged.blocks import BlockManager, Table
from kvpool.engine.paged.store import pieces
from kvpool.errors import ConfigError, LocalError

SIZE = 4
ROOT = bytes(32)


def manager_of(capacity: int = 8, keep: int = 8) -> BlockManager:
    return BlockManager(capacity=capacity, block_tokens=SIZE, keep=keep)


def grown(manager: BlockManager, tokens: int, span: int = 0) -> Table:
    """A table of `tokens` valid tokens of its own."""
    table = manager.open(span=span)
    assert manager.grow(table, tokens) == []
    manager.advance(table, tokens)
    return table


def keys_of(tokens: int) -> list[BlockKey]:
    return chain_keys(ROOT, range(tokens), SIZE, tail=True)


def test_sequences_lie_in_one_piece_while_there_is_room() -> None:
    """Sequences that grow in turns don't cut each other up: each has claimed a span."""
    manager = manager_of(capacity=32)
    tables = [manager.open(span=8) for _ in range(4)]
    for tokens in range(1, 8 * SIZE + 1):
        for table in tables:
            assert manager.grow(table, tokens) == []
            manager.advance(table, tokens)
    assert [len(pieces(table.blocks)) for table in tables] == [1] * 4
    assert manager.available == 0


def test_claims_are_wishes_only() -> None:
    """A span that nobody has filled yet is given to who needs it."""
    manager = manager_of(capacity=8)
    first = grown(manager, 1, span=8)
    second = grown(manager, 7 * SIZE, span=7)
    assert (len(first.blocks), len(second.blocks), manager.available) == (1, 7, 0)


def test_waste_is_less_than_a_block_per_sequence() -> None:
    """The bound of PagedAttention, for every length."""
    for tokens in range(1, 20):
        table = grown(manager_of(), tokens)
        assert 0 <= len(table.blocks) * SIZE - tokens < SIZE


def test_fork_copies_only_the_partial_block_and_only_when_written() -> None:
    """n answers to one prompt cost one prompt, and a block each."""
    manager = manager_of(capacity=16)
    parent = grown(manager, 10)
    children = [manager.fork(parent) for _ in range(3)]
    assert manager.held == 3
    for number, child in enumerate(children):
        (one,) = manager.grow(child, 11) or []
        assert (one.source, one.tokens, one.target) == (parent.blocks[2], 2, child.blocks[2])
        assert manager.held == 4 + number
    assert manager.grow(parent, 11) == []  # nobody else is left there


def test_grow_without_room_does_nothing() -> None:
    """All or nothing, the copy included."""
    manager = manager_of(capacity=3)
    parent = grown(manager, 10)
    child = manager.fork(parent)
    before = copy.deepcopy((child.blocks, child.tokens, manager.available))
    assert manager.lacking(child, 11) == 1
    assert manager.grow(child, 11) is None
    assert (child.blocks, child.tokens, manager.available) == before


def test_kept_blocks_are_found_by_their_names_and_tails_go_first() -> None:
    """A head without its tail is of use, a tail without its head isn't."""
    manager = manager_of(capacity=4)
    table = grown(manager, 14)
    keys = keys_of(14)
    for index, key in enumerate(keys):
        manager.name(key, table.blocks[index], min(SIZE, 14 - SIZE * index))
    manager.close(table)
    assert (manager.held, manager.kept, manager.match(keys)[1]) == (0, 4, 14)
    other = grown(manager, 2 * SIZE)
    assert manager.match(keys)[1] == 2 * SIZE
    manager.close(other)
    again = manager.open(*manager.match(keys))
    assert (again.tokens, manager.kept) == (8, 0)


def test_writing_behind_a_name_in_a_block_of_ones_own_keeps_the_name_and_into_it_drops_it() -> None:
    """A partial block's name stands for its first tokens only; a full block that is computed again isn't what its name says meanwhile."""
    manager = manager_of()
    table = grown(manager, 6)
    (_, tail), (full, _) = keys_of(6), keys_of(8)
    manager.name(tail, table.blocks[1], 2)
    assert manager.grow(table, 7) == []
    assert manager.match([tail]) == ([table.blocks[1]], 2)
    manager.name(full, table.blocks[0], SIZE)
    manager.truncate(table, 3)
    assert manager.grow(table, 4) == []
    assert manager.match([full]) == ([], 0)


def test_blocks_that_others_named_meanwhile_take_the_place_of_ones_own() -> None:
    """Two that began at once end with one copy, as far as the names go and whole blocks reach."""
    manager = manager_of(capacity=9)
    one, two = grown(manager, 14), manager.open()
    assert manager.grow(two, 14) == []
    keys = keys_of(14)
    for index in (0, 1, 3):
        manager.name(keys[index], one.blocks[index], min(SIZE, 14 - SIZE * index))
    assert (manager.adopt(two, keys), two.tokens, two.blocks[:2], manager.held) == (8, 8, one.blocks[:2], 6)
    manager.name(keys[2], one.blocks[2], SIZE)
    manager.close(one)
    assert (manager.kept, manager.adopt(two, keys[:2]), manager.adopt(two, keys), two.tokens) == (2, 0, 4, 12)
    manager.audit([two.blocks])


def test_misuse_is_told() -> None:
    """The books must not be cooked quietly."""
    manager = manager_of()
    table = grown(manager, 3)
    for wrong in (lambda: manager.advance(table, 9), lambda: manager.name(keys_of(3)[0], 7, 3), lambda: manager.open([7], 3)):
        with pytest.raises(LocalError):
            wrong()
    with pytest.raises(LocalError, match="counted 1"):
        manager.audit([])
    with pytest.raises(ConfigError):
        manager_of(capacity=0)


class Blocks(RuleBasedStateMachine):
    """Tables of made-up tokens over an array of slots that is really written to."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[Table, list[int]]] = []
        self.holds: list[list[int]] = []
        self.claims: dict[BlockKey, list[int]] = {}

    @initialize(capacity=st.integers(2, 12), keep=st.integers(0, 12))
    def start(self, capacity: int, keep: int) -> None:
        self.manager = manager_of(capacity, keep)
        self.slots = [[-1] * SIZE for _ in range(capacity)]

    def _write(self, table: Table, tokens: list[int], new: Sequence[int]) -> None:
        copies = self.manager.grow(table, len(tokens) + len(new))
        if copies is None:
            return
        for source, target, count in copies:
            self.slots[target][:count] = self.slots[source][:count]
        for token in new:
            block, inside = divmod(len(tokens), SIZE)
            self.slots[table.blocks[block]][inside] = token
            tokens.append(token)
        self.manager.advance(table, len(tokens))

    @rule(tokens=st.lists(st.integers(0, 1), max_size=14), span=st.integers(0, 6))
    def open(self, tokens: list[int], span: int) -> None:
        blocks, found = self.manager.match(chain_keys(ROOT, tokens, SIZE, tail=True))
        table = self.manager.open(blocks, found, span=span)
        mine = tokens[:found]
        self._write(table, mine, tokens[found:])
        self.tables.append((table, mine))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), new=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def append(self, which: int, new: list[int]) -> None:
        self._write(*self.tables[which % len(self.tables)], new)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=14), first=st.integers(0, 6))
    def adopt(self, tokens: list[int], first: int) -> None:
        """A table with room for all of them, of which the first few are its own; others may have named the next ones."""
        table, own, mine = self.manager.open(), tokens[:first], list[int]()
        self._write(table, mine, own)
        if len(mine) == len(own) and self.manager.grow(table, len(tokens)) is not None:
            gained = self.manager.adopt(table, chain_keys(ROOT, tokens, SIZE, tail=True))
            mine += tokens[len(own) :][:gained]
        assert table.tokens == len(mine)
        self.tables.append((table, mine))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def fork(self, which: int) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        self.tables.append((self.manager.fork(table), list(tokens)))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), tail=st.booleans())
    def name(self, which: int, tail: bool) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        for index, key in enumerate(chain_keys(ROOT, tokens, SIZE, tail=tail)):
            self.manager.name(key, table.blocks[index], min(SIZE, len(tokens) - index * SIZE))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def pooled(self, which: int) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        self.manager.pooled(table.blocks[: len(tokens) // SIZE])

    @rule(tokens=st.lists(st.integers(0, 1), max_size=14))
    def wanted(self, tokens: list[int]) -> None:
        self.manager.wanted(chain_keys(ROOT, tokens, SIZE, tail=True))

    @invariant()
    def pressure_is_of_what_is_there(self) -> None:
        free, price = self.manager.pressure
        assert 0 <= free <= SIZE * min(len(self.manager._free), self.manager.keep)
        assert price >= 0
        assert self.manager._pooled <= self.manager._names.keys()

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), left=st.integers(0, 10))
    def truncate(self, which: int, left: int) -> None:
        table, tokens = self.tables[which % len(self.tables)]
        self.manager.truncate(table, left)
        del tokens[left:]

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        table, _ = self.tables.pop(which % len(self.tables))
        self.manager.close(table)
        self.manager.close(table)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def hold(self, which: int) -> None:
        self.holds.append(self.manager.hold(self.tables[which % len(self.tables)][0].blocks))

    @precondition(lambda self: self.holds)
    @rule()
    def let_go(self) -> None:
        self.manager.let_go(self.holds.pop())

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for table, tokens in self.tables:
            assert [self.slots[table.blocks[i // SIZE]][i % SIZE] for i in range(len(tokens))] == tokens
            assert len(table.blocks) == self.manager.blocks_of(len(tokens)) or len(table.blocks) * SIZE >= len(tokens)

    @invariant()
    def names_lead_to_what_they_stand_for(self) -> None:
        for _, tokens in self.tables:
            blocks, found = self.manager.match(chain_keys(ROOT, tokens, SIZE, tail=True))
            assert [self.slots[blocks[i // SIZE]][i % SIZE] for i in range(found)] == tokens[:found]

    @invariant()
    def books_agree(self) -> None:
        self.manager.audit([*(table.blocks for table, _ in self.tables), *self.holds])
        assert self.manager.held + self.manager.available == self.manager.capacity


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase
