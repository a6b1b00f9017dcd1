"""Who holds which block: tables, reference counts, names, copy-on-write. Pure: no tensors, no threads, no clock.

Theory (PagedAttention, Kwon et al. 2023). The KV memory is an array of equal blocks. A sequence has a *table* of them; a block is in as
many tables as share it, and its reference count says in how many. A block may have *names*: block keys (`kvpool.block`), each
standing for its first n tokens. Whoever needs the KV of a key finds the block by its name, while others use it or afterwards:

    free        in no table, has no name
    kept        in no table, has names; found again by them, or given up (`kept.py` says which, and what that costs)
    held        in as many tables as its count says

What a name or another table sees never changes. Before a table's tokens grow into a block that others hold, the block is copied
(`Copy`, which the caller carries out at once); a name that stands for more than the table keeps is taken from a block that nobody else
holds. Within a table all blocks are full but the last, so a sequence wastes less than one block.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvpool.block import BlockKey
from kvpool.engine.paged.kept import LOADED, Kept
from kvpool.engine.paged.placement import Claim, FreeBlocks
from kvpool.errors import ConfigError, LocalError
from kvpool.request.events import Pressure


class Copy(NamedTuple):
    """The first `tokens` tokens of block `source` must be copied to block `target`."""

    source: int
    target: int
    tokens: int


class Listener(Protocol):
    """Hears of full blocks that can be found by a key."""

    def named(self, key: BlockKey, parent: BlockKey | None, depth: int) -> None:
        """One can be found now; `parent` is the key of the block before it, `depth` the tokens before it."""
        ...

    def unnamed(self, key: BlockKey) -> None:
        """It can't any more."""
        ...


@dataclass(slots=True, eq=False)
class Table:
    """The blocks of one sequence, of whose slots the first `tokens` are valid. Changed by `BlockManager` only."""

    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    claim: Claim | None = None
    closed: bool = False


class BlockManager:
    """`capacity` blocks of `block_tokens` tokens, of which at most `keep` are kept when no table holds them. `load_share`: see `Kept`."""

    def __init__(
        self,
        *,
        capacity: int,
        block_tokens: int,
        keep: int,
        listener: Listener | None = None,
        load_share: Callable[[], float] = lambda: LOADED,
    ) -> None:
        if capacity < 1 or block_tokens < 1 or keep < 0:
            raise ConfigError("a block manager needs at least one block of at least one token")
        self.capacity = capacity
        self.block_tokens = block_tokens
        self.keep = keep
        self._listener = listener
        self._free = FreeBlocks(capacity)
        self._refs = [0] * capacity
        self._named: dict[BlockKey, tuple[int, int]] = {}
        self._names: dict[int, dict[BlockKey, int]] = {}
        self._depths = [0] * capacity
        self._pooled: set[int] = set()
        self._kept = Kept(load_share)

    @property
    def available(self) -> int:
        """Blocks that can be had: free ones and kept ones."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        """Blocks in tables."""
        return self.capacity - self.available

    @property
    def kept(self) -> int:
        """Blocks in no table that can be found by a name."""
        return len(self._kept)

    @property
    def pressure(self) -> Pressure:
        """Tokens that can come and be kept when all that is held is kept too, and what each token more costs by what is given up."""
        free = max(0, min(len(self._free), self.keep - self.kept - self.held))
        return Pressure(free * self.block_tokens, self._kept.price)

    def blocks_of(self, tokens: int) -> int:
        """How many blocks `tokens` tokens take."""
        return -(-tokens // self.block_tokens)

    def match(self, keys: Sequence[BlockKey]) -> tuple[list[int], int]:
        """The blocks of the leading run of `keys`, and how many tokens they are worth. Changes nothing.

        The last key may be that of a partial block.
        """
        blocks: list[int] = []
        tokens = 0
        for key in keys:
            found = self._named.get(key)
            if found is None:
                break
            blocks.append(found[0])
            tokens += found[1]
        return blocks, tokens

    def open(self, blocks: Sequence[int] = (), tokens: int = 0, *, span: int = 0) -> Table:
        """A table that shares `blocks`, which `match` or another table gave, for their first `tokens` tokens.

        `span`: how many blocks it may come to have in all, so that they may lie together.
        """
        shared = list(blocks[: self.blocks_of(tokens)])
        for block in shared:
            if not self._refs[block]:
                if block not in self._kept:
                    raise LocalError(f"block {block} is free; only a block that is held or has a name can be shared")
                self._kept.take(block)
            self._refs[block] += 1
        own = span - tokens // self.block_tokens
        return Table(shared, tokens, self._free.claim(own) if own > 0 else None)

    def adopt(self, table: Table, keys: Sequence[BlockKey]) -> int:
        """Full blocks of `keys` behind the valid tokens of `table` that have names by now take the place of its own; tokens gained."""
        before = table.tokens
        while table.tokens % self.block_tokens == 0 and (index := table.tokens // self.block_tokens) < min(len(keys), len(table.blocks)):
            block, tokens = self._named.get(keys[index], (0, 0))
            if tokens < self.block_tokens:
                break
            if not self._refs[block]:
                self._kept.take(block)
            self._refs[block] += 1
            own, table.blocks[index] = table.blocks[index], block
            self._release(own)
            table.tokens += tokens
        return table.tokens - before

    def fork(self, table: Table) -> Table:
        """Another table of the same tokens; what either adds is its own."""
        return self.open(table.blocks, table.tokens)

    def lacking(self, table: Table, tokens: int) -> int:
        """How many blocks `grow` would take."""
        return max(0, self.blocks_of(tokens) - len(table.blocks)) + (tokens > table.tokens and self._must_copy(table))

    def grow(self, table: Table, tokens: int) -> list[Copy] | None:
        """Make the slots behind the valid ones writable, up to `tokens` tokens in all. None, and nothing done, if there is no room.

        The copies are to be made before anything else is asked of the manager.
        """
        if self.lacking(table, tokens) > self.available:
            return None
        copies: list[Copy] = []
        if tokens > table.tokens:
            index, inside = divmod(table.tokens, self.block_tokens)
            if self._must_copy(table):
                old, table.blocks[index] = table.blocks[index], self._take(table, index)
                self._release(old)
                copies.append(Copy(old, table.blocks[index], inside))
            elif inside:
                self._unname(table.blocks[index], inside)
        while len(table.blocks) < self.blocks_of(tokens):
            table.blocks.append(self._take(table, len(table.blocks)))
        return copies

    def advance(self, table: Table, tokens: int) -> None:
        """The first `tokens` slots are valid now; there must be that many."""
        if not table.tokens <= tokens <= len(table.blocks) * self.block_tokens:
            raise LocalError(f"a table of {len(table.blocks)} blocks can't advance from {table.tokens} to {tokens} tokens")
        table.tokens = tokens

    def truncate(self, table: Table, tokens: int) -> None:
        """Keep the first `tokens` tokens and no more blocks than they take."""
        table.tokens = min(tokens, table.tokens)
        while len(table.blocks) > self.blocks_of(table.tokens):
            self._release(table.blocks.pop())

    def name(self, key: BlockKey, block: int, tokens: int, parent: BlockKey | None = None, depth: int = 0) -> None:
        """The first `tokens` tokens of `block`, which a table holds, are what `key` stands for. A key that has a block keeps it.

        `parent` is the key of the block before it, and `depth` the tokens before it, for who listens.
        """
        if not self._refs[block]:
            raise LocalError(f"block {block} is in no table; only its holder can name it")
        if key not in self._named:
            self._named[key] = (block, tokens)
            self._names.setdefault(block, {})[key] = tokens
            self._depths[block] = depth
            if self._listener is not None and tokens == self.block_tokens:
                self._listener.named(key, parent, depth)

    def wanted(self, keys: Iterable[BlockKey]) -> None:
        """A sequence has to get the KV of `keys` from elsewhere, or to compute it."""
        self._kept.wanted(keys)

    def pooled(self, blocks: Iterable[int]) -> None:
        """The pool has what these blocks hold. Said of full blocks that a table or another holder holds."""
        self._pooled.update(block for block in blocks if self._names.get(block))

    def hold(self, blocks: Sequence[int]) -> list[int]:
        """Hold `blocks`, which some table holds, until they are given to `let_go`: something else reads or writes them meanwhile."""
        for block in blocks:
            self._refs[block] += 1
        return list(blocks)

    def let_go(self, blocks: Sequence[int]) -> None:
        """Undo `hold`."""
        for block in reversed(blocks):
            self._release(block)

    def close(self, table: Table) -> None:
        """The sequence has ended. A second call does nothing."""
        if table.closed:
            return
        table.closed = True
        if table.claim is not None:
            self._free.drop(table.claim)
            table.claim = None
        while table.blocks:  # tails first: they are of use to nobody without their heads
            self._release(table.blocks.pop())
        table.tokens = 0

    def clear(self) -> None:
        """Give up all that is kept."""
        while self._kept:
            self._give_up()

    def audit(self, holders: Sequence[Sequence[int]]) -> None:
        """Check the books against all tables' (and other holders') blocks. Raises `LocalError` where they don't agree."""
        counts = [0] * self.capacity
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        for block, count in enumerate(counts):
            states = (block in self._free, block in self._kept, self._refs[block] > 0)
            if self._refs[block] != count or sum(states) != 1:
                raise LocalError(f"block {block} is in {count} tables, counted {self._refs[block]}; free, kept, held: {states}")
            if bool(self._names.get(block)) and block in self._free:
                raise LocalError(f"block {block} is free and has a name")
        if any(self._names.get(block, {}).get(key) != tokens for key, (block, tokens) in self._named.items()):
            raise LocalError("a name leads to a block that doesn't know it")
        if len(self._kept) > self.keep:
            raise LocalError(f"{len(self._kept)} blocks are kept, {self.keep} may be")

    def _must_copy(self, table: Table) -> bool:
        index, inside = divmod(table.tokens, self.block_tokens)
        return inside > 0 and self._refs[table.blocks[index]] > 1

    def _take(self, table: Table, index: int) -> int:
        """A block to become the one at `index`, next to the one before if it can be, or at the head of the claim."""
        if not len(self._free):
            self._give_up()
        wanted = table.blocks[index - 1] + 1 if index else None
        if table.claim is not None and (wanted is None or not table.claim[0] < wanted < table.claim[1]):
            wanted = table.claim[0]
        block = self._free.take(wanted, table.claim)
        self._refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if self._names.get(block) and self.keep:
            self._kept.put(block, pooled=block in self._pooled)
            if len(self._kept) > self.keep:
                self._give_up()
        else:
            self._unname(block, 0)
            self._free.give(block)

    def _give_up(self) -> None:
        block = self._kept.first()
        key, tokens = max(self._names[block].items(), key=lambda name: name[1])
        self._kept.left(block, key, tokens, self._depths[block])
        self._unname(block, 0)
        self._free.give(block)

    def _unname(self, block: int, tokens: int) -> None:
        """Take the names from `block` that stand for more than `tokens` tokens."""
        names = self._names.get(block, {})
        for key in [key for key, count in names.items() if count > tokens]:
            full = names.pop(key) == self.block_tokens
            del self._named[key]
            if self._listener is not None and full:
                self._listener.unnamed(key)
        if not names:
            self._names.pop(block, None)
        self._pooled.discard(block)
