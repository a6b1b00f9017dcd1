"""Fetching what the pool has of a sequence's KV into its blocks, for as long as that is quicker than computing it.

The store's call writes into blocks from another thread. They are held until it has ended, however that is; and once a load is given up,
or its request is gone, nothing more is written, which a lock makes sure of: a sink either has copied its block before, or leaves it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.clock import seconds_left
from kvpool.engine.coming import Part
from kvpool.engine.paged.blocks import Table
from kvpool.engine.patience import Patience
from kvpool.engine.publisher import Memory
from kvpool.engine.sharing import LOOK_NS, Sharing
from kvpool.engine.store import BlockStore, Payload
from kvpool.engine.streaming import LayerGate, LayerStore, LayerStream

log = logging.getLogger(__name__)


class _Landing:
    """Where a load's blocks come down."""

    def __init__(self, memory: Memory, first: int, blocks: Sequence[int], counts: Sequence[int]) -> None:
        self.arrived = 0
        self._memory = memory
        self._first = first
        self._blocks = blocks
        self._counts = counts
        self._wanted = True
        self._lock = threading.Lock()

    def layer_sink(self, layer: int, index: int, part: Payload) -> bool:
        """`layer` of block `index` of the chain has come. True when it has come for all blocks now."""
        with self._lock:
            if self._wanted:
                at = index - self._first
                self._memory.kv.write_block(self._blocks[at], self._counts[at], part, first=layer)
            return self._wanted and index - self._first == len(self._blocks) - 1

    def sink(self, index: int, payload: Payload) -> None:
        """Block `index` of the chain has come. Called in order, by another thread."""
        with self._lock:
            if self._wanted:
                self._memory.kv.write_block(self._blocks[index - self._first], self._counts[index - self._first], payload)
                self.arrived += 1

    def end(self) -> int:
        """Write nothing more; how many blocks have come."""
        with self._lock:
            self._wanted = False
            return self.arrived


class Load:
    """The last blocks of `chain` on their way into the table of `part`, named as they come. `counts`: the tokens of each."""

    def __init__(
        self,
        store: BlockStore,
        memory: Memory,
        sharing: Sharing,
        part: Part,
        chain: Sequence[BlockKey],
        counts: Sequence[int],
        patience: Patience,
    ) -> None:
        first = len(chain) - len(counts)
        self._memory, self._sharing, self._part, self._patience = memory, sharing, part, patience
        self._chain, self._first, self._counts = chain, first, counts
        self._blocks = memory.manager.hold(part.work.table.blocks[first : len(chain)])
        self._landing = _Landing(memory, first, self._blocks, counts)
        self._named = 0
        self._call = asyncio.ensure_future(store.load(chain, first, counts, self._landing.sink, deadline_ns=patience.end_ns))
        self._call.add_done_callback(self._over)
        part.loading = True

    async def came(self) -> int:
        """Wait for it; how many blocks came. It goes on for others that wait for it when the caller is cancelled."""
        task = asyncio.ensure_future(self._run())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._sharing.end(self._part)
            if not self._part.wanted:
                task.cancel()
            raise

    async def _run(self) -> int:
        """While it is worth it and somebody wants it; how many blocks came."""
        call, patience = self._call, self._patience
        try:
            while not call.done() and self._part.wanted and not patience.lost(self._landing.arrived, time.monotonic_ns()):
                await asyncio.wait([call], timeout=min(LOOK_NS / 1e9, max(0.001, seconds_left(patience.end_ns))))
                self._name()
        finally:
            self._landing.end()
            call.cancel()
            self._name()
            self._sharing.loaded(self._part)
        if self._named < len(self._counts) and not call.done():
            log.info("a load was given up: %d of %d blocks had come", self._named, len(self._counts))
        return self._named

    def _name(self) -> None:
        """Others may find the blocks that have come."""
        came, manager, size = range(self._named, self._landing.arrived), self._memory.manager, self._memory.manager.block_tokens
        for index in came:
            at = self._first + index
            manager.name(self._chain[at], self._blocks[index], self._counts[index], self._chain[at - 1] if at else None, at * size)
        manager.pooled(self._blocks[index] for index in came if self._counts[index] == size)
        if came:
            self._named = came.stop
            self._sharing.moved()

    def _over(self, ended: "asyncio.Future[int]") -> None:
        """The store writes no more."""
        self._landing.end()
        self._name()
        self._memory.manager.let_go(self._blocks)
        self._memory.freed()
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.warning("a load from the pool failed: %s", error)


class Streaming:
    """A load by layers that goes on while the sequence is computed; `blocks` of them come. Made by `stream`."""

    def __init__(self, found: LayerStream, memory: Memory, landing: _Landing, held: list[int], deadline_ns: int) -> None:
        self.gate = LayerGate(deadline_ns)
        self.blocks = len(held)
        self._memory = memory
        self._landing = landing
        self._held = held
        self._task = asyncio.ensure_future(found.run(self._sink, deadline_ns=deadline_ns))
        self._task.add_done_callback(self._over)

    def cancel(self) -> None:
        """Write nothing more; whoever waits for a layer waits in vain."""
        self._landing.end()
        self._task.cancel()
        self.gate.fail()

    def _sink(self, layer: int, index: int, part: Payload) -> None:
        if self._landing.layer_sink(layer, index, part):
            self.gate.reached(layer + 1)

    def _over(self, ended: "asyncio.Future[bool]") -> None:
        self._landing.end()
        self.gate.fail()  # of what has come by now nothing is taken back
        self._memory.manager.let_go(self._held)
        self._memory.freed()
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.warning("a load by layers failed: %s", error)


async def stream(
    store: LayerStore, memory: Memory, table: Table, chain: Sequence[BlockKey], counts: Sequence[int], deadline_ns: int
) -> Streaming | None:
    """Begin to load the leading run of the last `counts` blocks of `chain` by layers; None if there is none."""
    first = len(chain) - len(counts)
    targets = memory.manager.hold(table.blocks[first : len(chain)])
    blocks = 0
    try:
        found = await store.layers(chain, first, counts, deadline_ns=deadline_ns)
        blocks = found.blocks
        if not blocks:
            return None
        return Streaming(found, memory, _Landing(memory, first, targets[:blocks], counts), targets[:blocks], deadline_ns)
    finally:
        memory.manager.let_go(targets[blocks:])
