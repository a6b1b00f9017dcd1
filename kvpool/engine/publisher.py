"""Pushes the finished blocks of one sequence to the pool while the next ones are computed.

Blocks are offered as they get full. One call to the store is in flight at a time; what gets full meanwhile goes together in
the next one. The store's calls are never cancelled (they copy out of the sequence's memory) but each has a deadline, and
`drain` waits no longer than asked: `busy` says whether the memory may be handed on.
"""

import asyncio
import logging
import time

from kvpool.clock import seconds_left
from kvpool.engine.cache import SequenceCache
from kvpool.engine.chain import Chain
from kvpool.engine.store import BlockStore, Payload
from kvpool.units import SECOND

log = logging.getLogger(__name__)

PUSH_NS = 5 * SECOND
TAIL_TTL_NS = 60 * SECOND
"""A partial block serves the hand-off from prefill to decode; then it only takes room."""


class Publisher:
    """Pushes blocks of `chain`, whose KV is in `cache`, to `store`; those before block `first` are in the pool already.

    They go to the nodes `also` too, where they are wanted next; what becomes of them there is told nowhere.
    `written` counts the blocks copied out (the others were there); `held` is the number of leading tokens the pool is known
    to hold; `failed` is set when a block could not be made present.
    """

    def __init__(self, store: BlockStore, chain: Chain, cache: SequenceCache, first: int, also: tuple[str, ...] = ()) -> None:
        self._store = store
        self._chain = chain
        self._cache = cache
        self._also = also
        self._pushed = self._offered = first
        self._tail = 0
        self._task: asyncio.Task[None] | None = None
        self.written = 0
        self.held = first * chain.block_tokens
        self.failed = False

    @property
    def busy(self) -> bool:
        """True while a call to the store is in flight."""
        return self._task is not None and not self._task.done()

    def offer(self, tokens: int) -> None:
        """The KV of the first `tokens` tokens is final: push what blocks that completes."""
        self._offered = max(self._offered, tokens // self._chain.block_tokens)
        self._start()

    def offer_tail(self) -> None:
        """The whole sequence is final: push its trailing partial block too, to live for a minute."""
        self.offer(self._cache.length)
        self._tail = self._cache.length % self._chain.block_tokens
        self._start()

    async def drain(self, deadline_ns: int) -> bool:
        """Wait until all offered is pushed, or given up; False when `deadline_ns` came first."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task], timeout=seconds_left(deadline_ns))
        return not self.busy

    def _start(self) -> None:
        if not self.busy and (self._pushed < self._offered or self._tail):
            self._task = asyncio.create_task(self._push())

    async def _push(self) -> None:
        try:
            while self._pushed < self._offered:
                first, self._pushed = self._pushed, self._offered
                await self._put(first, self._pushed, ttl_ns=0)
            if self._tail:
                self._tail = 0
                await self._put(self._pushed, self._pushed + 1, ttl_ns=TAIL_TTL_NS)
        except Exception:
            self.failed = True
            log.exception("blocks could not be pushed to the pool; the request goes on without")

    async def _put(self, first: int, end: int, *, ttl_ns: int) -> None:
        """Make blocks [first, end) present, the last of them possibly partial."""
        chain = self._chain.keys[:end] if end <= len(self._chain.keys) else self._chain.with_tail()
        counts = self._chain.counts(first, end)
        copied: set[int] = set()

        def fill(index: int, into: Payload) -> None:
            self._cache.copy_block(index, counts[index - first], into)
            copied.add(index)

        deadline_ns = time.monotonic_ns() + PUSH_NS
        present = await self._store.store(chain, first, counts, fill, deadline_ns=deadline_ns, ttl_ns=ttl_ns, also=self._also)
        self.written += len(copied)
        if present < end - first:
            self.failed = True
        if not self.failed:
            self.held = first * self._chain.block_tokens + sum(counts)
