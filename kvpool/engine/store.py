"""The engine's view of the pool: load and store runs of blocks of one chain.

A *chain* is all block keys of a token sequence from its first block on (`kvpool.block.chain_keys`), because where a block
lives follows from the head of its extent, which may lie before the blocks that are moved. `first` is the index of the first
block a call is about; `counts[i]` is the number of valid tokens of block `first + i` (only the last may be partial).

Remote trouble never raises here: a miss, an error or a passed deadline ends the leading run, and the engine computes the
rest. A call ends within its deadline (or a moment after), and once it has returned it calls neither sink nor fill any more. The
engine may cancel a load; it never cancels a store, which reads memory that is wanted again.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey
from kvpool.request import Scope

Payload = npt.NDArray[np.uint8]
Sink = Callable[[int, Payload], None]
"""Called as sink(i, payload) with the validated payload of chain[i]; the payload is valid only during the call."""
Fill = Callable[[int, Payload], None]
"""Called as fill(i, payload) to write the payload of chain[i] in place."""


class BlockStore(Protocol):
    """A place that keeps blocks. `deadline_ns` is monotonic time. Sinks and fills are called from another thread, in order."""

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Sink, *, deadline_ns: int) -> int:
        """Deliver the leading run of chain[first : first + len(counts)]; how many blocks were delivered."""
        ...

    async def store(
        self,
        chain: Sequence[BlockKey],
        first: int,
        counts: Sequence[int],
        fill: Fill,
        *,
        deadline_ns: int,
        ttl_ns: int = 0,
        also: Sequence[str] = (),
    ) -> int:
        """Make chain[first : first + len(counts)] present; how many of them the store now holds.

        `also` names nodes where they are wanted next, whose copies nothing depends on.
        """
        ...

    def reaches(self) -> dict[str, str]:
        """How each node's bytes are reached right now: node id -> reach name."""
        ...

    def scoped(self, scope: Scope) -> "BlockStore":
        """The same store as `scope` sees it: chains begin at its root, and what is written counts against its tenant."""
        ...


class NullStore:
    """Holds nothing: an engine without a pool."""

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Sink, *, deadline_ns: int) -> int:
        """Always a miss."""
        return 0

    async def store(
        self,
        chain: Sequence[BlockKey],
        first: int,
        counts: Sequence[int],
        fill: Fill,
        *,
        deadline_ns: int,
        ttl_ns: int = 0,
        also: Sequence[str] = (),
    ) -> int:
        """Keeps nothing."""
        return 0

    def reaches(self) -> dict[str, str]:
        """No nodes."""
        return {}

    def scoped(self, scope: Scope) -> "NullStore":
        """Nothing for anybody."""
        return self


class MemoryStore:
    """The in-memory twin: really keeps the bytes, in this process, and fails on demand.

    `fail_loads_from` is the chain index from which loads miss as if the pool had failed in the middle; `fail_stores` makes
    stores keep nothing. `loads` and `stores` note each call as (first, blocks asked for, blocks done), `pushed` each block that was to be
    stored and where it was wanted too.
    """

    def __init__(self, bytes_per_token: int) -> None:
        self.blocks: dict[BlockKey, Payload] = {}
        self.ttls: dict[BlockKey, int] = {}
        self.fail_loads_from: int | None = None
        self.fail_stores = False
        self.loads: list[tuple[int, int, int]] = []
        self.stores: list[tuple[int, int, int]] = []
        self.pushed: list[tuple[BlockKey, tuple[str, ...]]] = []
        self._bytes_per_token = bytes_per_token
        self._lock = threading.Lock()

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Sink, *, deadline_ns: int) -> int:
        """Deliver copies from another thread."""
        return await asyncio.to_thread(self._load, list(chain), first, list(counts), sink)

    async def store(
        self,
        chain: Sequence[BlockKey],
        first: int,
        counts: Sequence[int],
        fill: Fill,
        *,
        deadline_ns: int,
        ttl_ns: int = 0,
        also: Sequence[str] = (),
    ) -> int:
        """Keep copies, filled from another thread."""
        self.pushed.extend((key, tuple(also)) for key in chain[first : first + len(counts)])
        return await asyncio.to_thread(self._store, list(chain), first, list(counts), fill, ttl_ns)

    def reaches(self) -> dict[str, str]:
        """One node, this process."""
        return {"0" * 32: "memory"}

    def scoped(self, scope: Scope) -> "MemoryStore":
        """The keys keep scopes apart."""
        return self

    def _load(self, chain: list[BlockKey], first: int, counts: list[int], sink: Sink) -> int:
        done = 0
        for index, count in enumerate(counts, first):
            with self._lock:
                kept = self.blocks.get(chain[index])
            broken = self.fail_loads_from is not None and index >= self.fail_loads_from
            if kept is None or broken or kept.nbytes != count * self._bytes_per_token:
                break
            sink(index, kept.copy())
            done += 1
        self.loads.append((first, len(counts), done))
        return done

    def _store(self, chain: list[BlockKey], first: int, counts: list[int], fill: Fill, ttl_ns: int) -> int:
        done = 0
        for index, count in enumerate(counts, first):
            if self.fail_stores:
                break
            with self._lock:
                known = chain[index] in self.blocks
            if not known:
                payload = np.empty(count * self._bytes_per_token, np.uint8)
                fill(index, payload)
                with self._lock:
                    self.blocks[chain[index]] = payload
                    self.ttls[chain[index]] = ttl_ns
            done += 1
        self.stores.append((first, len(counts), done))
        return done
