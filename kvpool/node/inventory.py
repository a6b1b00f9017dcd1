"""All that a node holds, in any tier, in slices small enough for the event loop, each block with the head of its extent.

A walk goes over the arena's blocks in order of commit, then over what only other tiers hold. It is a walk over what was there when it
began; blocks that leave meanwhile are left out, blocks that come are for the next walk. It reads indexes, no blocks.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvpool.block import BlockKey
from kvpool.block.identity import FINGERPRINT_BYTES
from kvpool.node.tiers import Tiers
from kvpool.policy.moves import extent_head
from kvpool.pool import PoolState
from kvpool.tier import Arena
from kvpool.tier.contract import Tier
from kvpool.units import SECOND

SLICE = 256
_MAX_KNOWN = 1 << 16
_MAX_CLIMB = 1024
_READ_NS = 5 * SECOND
_FINGERPRINT_AT, _BLOCK_TOKENS_AT = 76, 94
"""Where a frame's header has the namespace, and the tokens of a whole block (u16); see `kvpool.block.header`."""


class Held(NamedTuple):
    """A block that is here: `head` of its extent (None where it can't be told), bytes of its frame, whether it is only a near copy."""

    key: BlockKey
    head: BlockKey | None
    length: int
    near: bool


class Inventory:
    """Walks over one node's index and its tiers."""

    def __init__(self, pool: PoolState, arena: Arena, tiers: Tiers) -> None:
        self._pool = pool
        self._arena = arena
        self._tiers = tiers
        self._known: dict[BlockKey, BlockKey | None] = {}
        self._next_depth: dict[BlockKey, int] = {}
        self._namespaces: dict[BlockKey, str] = {}

    async def slices(self, extent_tokens: int) -> AsyncIterator[list[Held]]:
        """Everything, at most `SLICE` blocks at a time."""
        self._known.clear()
        keys = self._pool.committed_keys()
        seen: set[BlockKey] = set()  # what is in the arena by the time a tier is listed needn't have been there when the walk began
        for at in range(0, len(keys), SLICE):
            here = [held for key in keys[at : at + SLICE] if (held := self._held(key, extent_tokens)) is not None]
            seen.update(held.key for held in here if not held.near)
            yield here
        del keys
        for tier in self._tiers.all():
            entries, self._next_depth = await asyncio.to_thread(_listed, tier)
            for at in range(0, len(entries), SLICE):
                some = [one for one in entries[at : at + SLICE] if one[0] not in seen]
                if tier is self._tiers.beside:
                    seen.update(key for key, _ in some)
                yield [Held(key, self.head(key, extent_tokens), length, False) for key, length in some]
            self._next_depth = {}

    def head(self, key: BlockKey, extent_tokens: int) -> BlockKey | None:
        """The head of the extent of a block that is here."""
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        return extent_head(key, self._link, extent_tokens, self._block_tokens, self._known)

    def gaps(self, keys: Sequence[BlockKey]) -> dict[BlockKey, BlockKey]:
        """For blocks whose heads can't be told: the first block above each that isn't here, in the same extent."""
        seen: dict[BlockKey, BlockKey | None] = {}
        for key in keys:
            at, path, gap = key, list[BlockKey](), None
            while at not in seen and len(path) < _MAX_CLIMB:
                found = self._link(at)
                if found is None:
                    gap = at
                    break
                path.append(at)
                if found[0] is None:
                    break
                at = found[0]
            else:
                gap = seen.get(at)
            if path == [key] and self._block_tokens(key) is None:
                gap = None  # it may be the first of an extent: how long that is can't be told
            seen.update(dict.fromkeys(path, gap))
        return {key: gap for key in keys if (gap := seen.get(key)) is not None}

    def learn(self, heads: Mapping[BlockKey, BlockKey]) -> None:
        """Others have told the heads of these blocks."""
        self._known.update(heads)

    def fingerprint(self, key: BlockKey) -> str | None:
        """The namespace (32 hex digits) of a block in the arena."""
        data = self._header(key, _FINGERPRINT_AT, FINGERPRINT_BYTES)
        return None if data is None else data.hex()

    async def namespaces(self, held: Sequence[Held]) -> Mapping[BlockKey, str]:
        """The namespace of each extent, by its head. Where no block of it is in the arena one is read; where that fails it is missing."""
        if len(self._namespaces) > _MAX_KNOWN:
            self._namespaces.clear()
        for one in held:
            if one.head is None or one.head in self._namespaces:
                continue
            found = self.fingerprint(one.key) or await self._read_fingerprint(one.key)
            if found is not None:
                self._namespaces[one.head] = found
        return self._namespaces

    async def _read_fingerprint(self, key: BlockKey) -> str | None:
        (found,) = self._tiers.find([key])
        if found is None:
            return None
        frame = np.empty(found.entry.length, np.uint8)
        (there,) = await asyncio.to_thread(found.tier.get, [(key, frame)], time.monotonic_ns() + _READ_NS)
        return frame[_FINGERPRINT_AT : _FINGERPRINT_AT + FINGERPRINT_BYTES].tobytes().hex() if there else None

    def _held(self, key: BlockKey, extent_tokens: int) -> Held | None:
        place, link = self._pool.locate(key), self._pool.link(key)
        return None if place is None or link is None else Held(key, self.head(key, extent_tokens), place.length, link[2])

    def _link(self, key: BlockKey) -> tuple[BlockKey | None, int] | None:
        link = self._pool.link(key)
        if link is not None:
            return link[:2]
        (found,) = self._tiers.find([key])
        return None if found is None else (found.entry.parent, found.entry.depth)

    def _block_tokens(self, key: BlockKey) -> int | None:
        """By its own header, if it is in the arena; else by a block that follows it in the tier that is being walked."""
        data, link = self._header(key, _BLOCK_TOKENS_AT, 2), self._link(key)
        if data is not None:
            return int.from_bytes(data, "little") or None
        return self._next_depth[key] - link[1] if key in self._next_depth and link is not None else None

    def _header(self, key: BlockKey, at: int, nbytes: int) -> bytes | None:
        place = self._pool.locate(key)
        if place is None or place.length < at + nbytes:
            return None
        return self._arena.view(place.offset + at, nbytes).tobytes()


def _listed(tier: Tier) -> tuple[list[tuple[BlockKey, int]], dict[BlockKey, int]]:
    """Keys and lengths of all that a tier holds, and at which depth the block after a key begins. Blocking."""
    entries = list(tier.entries())
    return [(one.key, one.length) for one in entries], {one.parent: one.depth for one in entries if one.parent is not None}
