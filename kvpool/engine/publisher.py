"""Pushes the finished blocks of one sequence to the pool while the next ones are computed.

Blocks are offered as they get full. One call to the store is in flight at a time; what gets full meanwhile goes together in
the next one. From the offer until it is pushed a block is held, whatever becomes of the sequence: so a sequence that is preempted or has
ended leaves its place at once, and its blocks when the pool has them. The store's calls are never cancelled (they copy out of the
blocks) but each has a deadline, and `drain` waits no longer than asked.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.clock import seconds_left
from kvpool.engine.chain import Chain
from kvpool.engine.paged.blocks import BlockManager, Table
from kvpool.engine.paged.store import KvStore
from kvpool.engine.store import BlockStore, Payload
from kvpool.units import SECOND

log = logging.getLogger(__name__)

PUSH_NS = 5 * SECOND
TAIL_TTL_NS = 60 * SECOND
"""A partial block serves the hand-off from prefill to decode; then it only takes room."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the blocks of this engine are, who holds them, and whom to tell that some are held no more."""

    kv: KvStore
    manager: BlockManager
    freed: Callable[[], None]


class Publisher:
    """Pushes blocks of `chain` from `memory` to `store`; those before block `first` are in the pool already.

    They go to the nodes `also` too, where they are wanted next; what becomes of them there is told nowhere.
    `written` counts the blocks copied out (the others were there); `held` is the number of leading tokens the pool is known
    to hold; `failed` is set when a block could not be made present.
    """

    def __init__(self, store: BlockStore, chain: Chain, memory: Memory, first: int, also: tuple[str, ...] = ()) -> None:
        self._store = store
        self._chain = chain
        self._memory = memory
        self._also = also
        self.first = self._pushed = first
        self._blocks: list[int] = []  # held: those of the chain's blocks from `_pushed` on
        self._tail: list[int] = []
        self._task: asyncio.Task[None] | None = None
        self.written = 0
        self.held = first * chain.block_tokens
        self.failed = False

    @property
    def busy(self) -> bool:
        """True while a call to the store is in flight."""
        return self._task is not None and not self._task.done()

    def offer(self, table: Table, pure: int) -> None:
        """The KV of the first `pure` of the valid tokens of `table` is what their keys stand for: push what blocks that completes."""
        new = table.blocks[self._pushed + len(self._blocks) : pure // self._chain.block_tokens]
        self._blocks += self._memory.manager.hold(new)
        self._start()

    def offer_tail(self, table: Table) -> None:
        """The whole sequence is pure and over: push its trailing partial block too, to live for a minute. Offer nothing afterwards."""
        self.offer(table, table.tokens)
        if table.tokens % self._chain.block_tokens:
            self._tail = self._memory.manager.hold(table.blocks[table.tokens // self._chain.block_tokens :][:1])
            self._start()

    async def drain(self, deadline_ns: int) -> bool:
        """Wait until all offered is pushed, or given up; False when `deadline_ns` came first."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=seconds_left(deadline_ns))
        return not self.busy

    def _start(self) -> None:
        if not self.busy and (self._blocks or self._tail):
            self._task = asyncio.create_task(self._push())

    async def _push(self) -> None:
        try:
            while self._blocks:
                blocks, self._blocks = self._blocks, []
                first, self._pushed = self._pushed, self._pushed + len(blocks)
                await self._put(first, blocks, ttl_ns=0)
            if self._tail:
                blocks, self._tail = self._tail, []
                await self._put(self._pushed, blocks, ttl_ns=TAIL_TTL_NS)
        except Exception:
            self.failed = True
            self._memory.manager.let_go([*self._blocks, *self._tail])
            self._pushed += len(self._blocks)
            self._blocks, self._tail = [], []
            log.exception("blocks could not be pushed to the pool; the request goes on without")

    async def _put(self, first: int, blocks: list[int], *, ttl_ns: int) -> None:
        """Make `blocks`, the chain's from `first` on, present, the last of them possibly partial; let go of them."""
        try:
            end = first + len(blocks)
            chain = self._chain.with_tail() if ttl_ns else self._chain.keys[:end]
            counts = self._chain.counts(first, end)
            copied: set[int] = set()

            def fill(index: int, into: Payload) -> None:
                self._memory.kv.copy_block(blocks[index - first], counts[index - first], into)
                copied.add(index)

            deadline_ns = time.monotonic_ns() + PUSH_NS
            present = await self._store.store(chain, first, counts, fill, deadline_ns=deadline_ns, ttl_ns=ttl_ns, also=self._also)
            if not ttl_ns:
                self._memory.manager.pooled(blocks[:present])
        finally:
            self._memory.manager.let_go(blocks)
            self._memory.freed()
        self.written += len(copied)
        if present < end - first:
            self.failed = True
        if not self.failed:
            self.held = first * self._chain.block_tokens + sum(counts)
