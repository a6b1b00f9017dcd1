"""KV of finished sequences that stays in the worker, so that the next turn of a conversation needs no load.

Theory. The store holds whole `SequenceCache`s up to a number of bytes, the least recently put one leaving first. A request
takes the one that shares the longest prefix with it; it becomes that request's own cache, truncated to what is shared, so
there is never a copy and never two users. An index from block key to the caches that hold the block finds it: keys chain,
so a cache that holds a key holds all before it. Behind the last shared block single tokens are compared. What is taken by a
request that shares little is lost here for the others; the pool still has it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.block import BlockKey
from kvpool.engine.cache import SequenceCache


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    keys: tuple[BlockKey, ...]
    tokens: tuple[int, ...]
    cache: SequenceCache


class ResidentStore:
    """At most `capacity_bytes` of caches (0: keeps nothing). For one thread."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.tokens = 0
        self._entries: dict[int, _Entry] = {}  # in order of age
        self._holders: dict[BlockKey, dict[int, None]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, keys: Sequence[BlockKey], tokens: Sequence[int], cache: SequenceCache) -> bool:
        """Keep `cache`, the KV of the first `cache.length` of `tokens`, whose full blocks have `keys`. False if it isn't kept.

        The caller lets go of it. A cache without a full block, or larger than the store, isn't kept.
        """
        full = tuple(keys[: cache.length // cache.geometry.block_tokens])
        if not full or cache.nbytes > self.capacity_bytes:
            return False
        self._drop_prefixes_of(full)
        while self.used_bytes + cache.nbytes > self.capacity_bytes:
            self._remove(next(iter(self._entries)))
        number, self._next = self._next, self._next + 1
        self._entries[number] = _Entry(keys=full, tokens=tuple(tokens[: cache.length]), cache=cache)
        self.used_bytes += cache.nbytes
        self.tokens += cache.length
        for key in full:
            self._holders.setdefault(key, {})[number] = None
        return True

    def take(self, keys: Sequence[BlockKey], tokens: Sequence[int]) -> SequenceCache | None:
        """The cache sharing the longest prefix with `tokens` (full blocks `keys`), truncated to it; None if none shares a block."""
        for blocks in range(len(keys), 0, -1):
            if holders := self._holders.get(keys[blocks - 1]):
                shared, number = max((self._shared(n, blocks, tokens), n) for n in holders)  # of equals the youngest
                entry = self._remove(number)
                entry.cache.truncate(shared)
                return entry.cache
        return None

    def clear(self) -> None:
        """Drop everything."""
        for number in list(self._entries):
            self._remove(number)

    def _shared(self, number: int, blocks: int, tokens: Sequence[int]) -> int:
        """Tokens that entry `number`, known to share `blocks` blocks, shares with `tokens`."""
        entry = self._entries[number]
        shared = blocks * entry.cache.geometry.block_tokens
        for mine, theirs in zip(tokens[shared:], entry.tokens[shared:], strict=False):
            if mine != theirs:
                break
            shared += 1
        return shared

    def _drop_prefixes_of(self, keys: tuple[BlockKey, ...]) -> None:
        """What is a prefix of a newcomer is of no more use."""
        for number in [n for n in self._holders.get(keys[0], ()) if self._entries[n].keys == keys[: len(self._entries[n].keys)]]:
            self._remove(number)

    def _remove(self, number: int) -> _Entry:
        entry = self._entries.pop(number)
        self.used_bytes -= entry.cache.nbytes
        self.tokens -= entry.cache.length
        for key in entry.keys:
            holders = self._holders[key]
            del holders[number]
            if not holders:
                del self._holders[key]
        return entry
