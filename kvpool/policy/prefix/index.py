"""The prefix index: which leading blocks of a prompt each worker and each pool node holds.

Theory. One dict leads from each key to the chunk (chunk.py) that it stands in; a chunk knows who holds which part of it. A prompt is
matched chunk by chunk: one look-up and one comparison for up to 128 blocks, because a key names all before it. What a holder says
changes runs of chunks, not keys, so a prefix that a thousand workers share costs its keys once.

A key enters a chunk behind its predecessor, or begins a new one, and stays behind its predecessor. So a walk along a chain enters each
chunk at its first key, holes or not. Blocks may be told of in any order: two short chunks of which one follows the other become one.

Nothing here is trusted, only preferred, so the index may forget at will. It keeps `holder_keys` keys for each holder; beyond that the part
of a chain that was longest not told of leaves, its tail first: a prefix without its head is worth nothing. Keys that nobody holds any more
go at once, save those in the middle of a chunk: they go with it.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from itertools import compress, count
from typing import Final, Generic, TypeVar

from kvpool.block import BlockKey
from kvpool.policy.prefix.chunk import CHUNK_KEYS, Chunk
from kvpool.policy.prefix.credit import Credit
from kvpool.policy.prefix.match import Match
from kvpool.policy.prefix.states import NOBODY, State, on, slots_of

H = TypeVar("H", bound=Hashable)

HOLDER_KEYS: Final = 1 << 20
"""Keys kept for one holder unless told otherwise: 16 Mi tokens in blocks of 16; about 170 bytes each if nobody shares them."""
_SLACK: Final = 256
"""A holder over its bound gives up this part of it at once, so that it isn't cut key by key."""


class _Holding:
    """One holder: its number, and its keys in each chunk that it has a part of, the longest untold chunk first."""

    __slots__ = ("chunks", "keys", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.keys = 0
        self.chunks: OrderedDict[Chunk, int] = OrderedDict()


class PrefixIndex(Generic[H]):
    """Keys by holder and tier. Holders are any hashable values; those of different lives of a worker or node must differ."""

    def __init__(self, holder_keys: int = HOLDER_KEYS) -> None:
        """`holder_keys` bounds the keys kept for each holder."""
        if holder_keys < 1:
            raise ValueError("holder_keys must be at least 1")
        self._limit = holder_keys
        self._chunks: dict[BlockKey, Chunk] = {}
        self._behind: dict[BlockKey, Chunk] = {}  # by the key before its first one, where that is known
        self._holdings: dict[H, _Holding] = {}
        self._slots: dict[H, int] = {}
        self._holders: list[H] = []
        self._free: list[int] = []
        self._credit: Credit[H] = Credit()
        self.dropped = 0
        """Keys that were given up for want of room, over all holders."""

    def __len__(self) -> int:
        """Distinct keys."""
        return len(self._chunks)

    def pieces(self) -> int:
        """How many chunks the keys are in. O(keys)."""
        return len(set(self._chunks.values()))

    def held(self, holder: H) -> int:
        """Keys that are kept for `holder`."""
        holding = self._holdings.get(holder)
        return holding.keys if holding else 0

    def holders(self) -> tuple[H, ...]:
        """Everybody who was heard of and not forgotten."""
        return tuple(self._holdings)

    def stored(self, holder: H, keys: Sequence[BlockKey], tier: int, *, parent: BlockKey | None = None, moved: bool = False) -> None:
        """`holder` has the consecutive blocks `keys` of a chain on `tier`: as well as elsewhere, or with `moved` only there.

        `parent` is the key before the first of them, if known; without it `keys` are matched all the same, but less compactly kept.
        Raises `ValueError` for an unknown tier.
        """
        holding = self._holding(holder)
        keys = keys if len(keys) <= self._limit else keys[: self._limit]
        mine = 1 << holding.slot
        put, clear = on(tier, mine), (mine, mine, mine) if moved else NOBODY
        get, position = self._chunks.get, 0
        told: list[Chunk] = []
        before = get(parent) if parent is not None else None
        if before is not None and before.keys[-1] != parent:
            before = None
        while position < len(keys):
            chunk = get(keys[position])
            if chunk is None:
                back = keys[position - 1] if position else parent
                position, before = self._add(holding, keys, position, put, before, back, told)
                continue
            start = chunk.find(keys[position])
            size = chunk.common(start, keys, position)
            self._gain(holding, chunk, chunk.change(start, start + size, mine, clear, put))
            told.append(chunk)
            position += size
            before = chunk if start + size == len(chunk.keys) else None
        for chunk in reversed(told):
            if chunk in holding.chunks:  # it may have been joined to another
                holding.chunks.move_to_end(chunk)
        if holding.keys > self._limit:
            self._shrink(holding)

    def removed(self, holder: H, keys: Sequence[BlockKey], tier: int | None = None) -> None:
        """`holder` has `keys` (in any order) no more: on `tier`, or at all."""
        holding = self._holdings.get(holder)
        if holding is None:
            return
        mine = 1 << holding.slot
        clear = (mine, mine, mine) if tier is None else on(tier, mine)
        position = 0
        while position < len(keys):
            chunk = self._chunks.get(keys[position])
            if chunk is None:
                position += 1
                continue
            start = chunk.find(keys[position])
            size = chunk.along(start, keys, position, 1)
            if size > 1:
                self._clear(holding, chunk, start, start + size, mine, clear)
            else:
                size = chunk.along(start, keys, position, -1)
                self._clear(holding, chunk, start - size + 1, start + 1, mine, clear)
            position += size

    def cleared(self, holder: H) -> None:
        """`holder` has nothing any more."""
        holding = self._holdings.get(holder)
        if holding is None:
            return
        mine = 1 << holding.slot
        for chunk in holding.chunks:
            chunk.change(0, len(chunk.keys), mine, (mine, mine, mine), NOBODY)
            self._trim(chunk)
        holding.chunks.clear()
        holding.keys = 0

    def forget(self, holder: H) -> None:
        """`holder` is gone for good, and so is what was proved about it."""
        self._credit.forget(holder)
        if holder in self._holdings:
            self.cleared(holder)
            del self._holdings[holder]
            self._free.append(self._slots.pop(holder))

    def match(self, keys: Sequence[BlockKey]) -> Match[H]:
        """Who holds which of the leading `keys` of a chain. Changes nothing."""
        get, position, size = self._chunks.get, 0, len(keys)
        runs: list[tuple[int, State]] = []
        last = NOBODY
        while position < size and (chunk := get(keys[position])) is not None:
            mine = chunk.keys
            start, end = 0, len(mine)
            if position + end > size or mine[-1] != keys[position + end - 1] or mine[0] != keys[position]:  # not all of it
                start = chunk.find(keys[position])
                end = start + chunk.common(start, keys, position)
            offset = position - start
            for i in range(chunk.run_at(start) if start else 0, len(chunk.ends)):
                state, stop = chunk.states[i], chunk.ends[i]
                if stop > end:
                    stop = end
                if state == last:
                    if not runs:
                        return Match(runs, self._holders, self._slots)
                    runs[-1] = (offset + stop, state)
                elif state == NOBODY:
                    return Match(runs, self._holders, self._slots)
                else:
                    runs.append((offset + stop, state))
                    last = state
                if stop == end:
                    break
            position = offset + end
        return Match(runs, self._holders, self._slots)

    def touch(self, holder: H, keys: Sequence[BlockKey]) -> None:
        """`holder` used the chain `keys`: what it has of them leaves last."""
        holding = self._holdings.get(holder)
        if holding is None:
            return
        told: list[Chunk] = []
        position = 0
        while position < len(keys) and (chunk := self._chunks.get(keys[position])) is not None:
            position += chunk.common(chunk.find(keys[position]), keys, position)
            told.append(chunk)
        for chunk in reversed(told):
            if chunk in holding.chunks:
                holding.chunks.move_to_end(chunk)

    def proved(self, holder: H, claimed: int, found: int) -> None:
        """A request that was sent to `holder` when this index said it had `claimed` leading blocks of it found `found` there."""
        self._credit.prove(holder, claimed, found)

    def credit(self, holder: H) -> float:
        """How far `holder` is believed, 0 to 1 (credit.py)."""
        return self._credit.of(holder)

    def credited(self, holder: H, blocks: int) -> int:
        """`blocks` that `holder` is said to have, less what it isn't believed."""
        return int(blocks * self._credit.of(holder))

    def _holding(self, holder: H) -> _Holding:
        holding = self._holdings.get(holder)
        if holding is None:
            if self._free:
                slot = self._free.pop()
                self._holders[slot] = holder
            else:
                slot = len(self._holders)
                self._holders.append(holder)
            self._slots[holder] = slot
            holding = self._holdings[holder] = _Holding(slot)
        return holding

    def _add(
        self,
        holding: _Holding,
        keys: Sequence[BlockKey],
        position: int,
        state: State,
        before: Chunk | None,
        parent: BlockKey | None,
        told: list[Chunk],
    ) -> tuple[int, Chunk | None]:
        """Enter the unknown keys from `position`, behind `parent`, up to the next known one; where that is, and the chunk that ends there.

        `before`: the chunk whose last key is `parent`.
        """
        end = position + 1
        if end < len(keys):
            rest = keys[position:]
            end = position + next(compress(count(), map(self._chunks.__contains__, rest)), len(rest))
        while position < end:
            room = CHUNK_KEYS - len(before.keys) if before is not None else 0
            part = keys[position : min(end, position + (room or CHUNK_KEYS))]
            if before is not None and room:
                before.append(part, state)
            else:
                before = Chunk(list(part), state)
                if parent is not None and self._behind.setdefault(parent, before) is before:
                    before.parent = parent
            self._chunks.update(dict.fromkeys(part, before))
            self._gain(holding, before, len(part))
            position, parent = position + len(part), part[-1]
            if parent in self._behind:
                before = self._join(before, self._behind[parent])
            if not told or told[-1] is not before:
                told.append(before)
        return position, before if before is not None and before.keys[-1] == parent else None

    def _join(self, before: Chunk, after: Chunk) -> Chunk:
        """Make one chunk of `before` and `after`, which follows it, if they are short enough; the one that `before`'s keys are in then."""
        if len(before.keys) + len(after.keys) > CHUNK_KEYS or before is after:
            return before
        del self._behind[before.keys[-1]]
        if len(before.keys) < len(after.keys):
            kept, gone = after, before
            kept.parent = before.parent
            if before.parent is not None:
                self._behind[before.parent] = kept
            kept.precede(before)
        else:
            kept, gone = before, after
            kept.follow(after)
        self._chunks.update(dict.fromkeys(gone.keys, kept))
        for slot in slots_of(gone.holders()):
            chunks = self._holdings[self._holders[slot]].chunks
            chunks[kept] = chunks.get(kept, 0) + chunks.pop(gone)
        return kept

    def _gain(self, holding: _Holding, chunk: Chunk, keys: int) -> None:
        """`holding` has `keys` more (or less) in `chunk`."""
        now = holding.chunks.get(chunk, 0) + keys
        holding.keys += keys
        if now:
            holding.chunks[chunk] = now
        else:
            holding.chunks.pop(chunk, None)

    def _clear(self, holding: _Holding, chunk: Chunk, low: int, high: int, mine: int, clear: State) -> None:
        """Take the sets `clear`, of `holding`'s bit `mine`, from the keys [low, high) of `chunk`."""
        self._gain(holding, chunk, chunk.change(low, high, mine, clear, NOBODY))
        self._trim(chunk)

    def _trim(self, chunk: Chunk) -> None:
        """Forget the keys at the end of `chunk` that nobody holds."""
        for key in chunk.trim():
            del self._chunks[key]
        if not chunk.keys and chunk.parent is not None:
            del self._behind[chunk.parent]

    def _shrink(self, holding: _Holding) -> None:
        """Give up what was longest not told of, tails first, until `holding` is within its bound."""
        mine, target = 1 << holding.slot, self._limit - self._limit // _SLACK
        while holding.keys > target:
            chunk, held = next(iter(holding.chunks.items()))
            excess = holding.keys - target
            low = 0 if held <= excess else chunk.tail_of(mine, excess)
            self.dropped += min(held, excess)
            self._clear(holding, chunk, low, len(chunk.keys), mine, (mine, mine, mine))
