"""One request's sequence inside the worker: tokens, their KV, where it came from, and its way back to the pool."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvpool.block import BlockKey
from kvpool.engine.cache import SequenceCache
from kvpool.engine.chain import Chain
from kvpool.engine.compute import ComputeThread, Ran
from kvpool.engine.model import Model
from kvpool.engine.prefill import Rate, chunk_plan
from kvpool.engine.publisher import Publisher
from kvpool.engine.resident import ResidentStore
from kvpool.engine.sampling import Sampled, sample
from kvpool.engine.store import BlockStore, Payload
from kvpool.engine.turns import Kind
from kvpool.errors import LocalError
from kvpool.request import Sampling, StageTimes, TokenSources

log = logging.getLogger(__name__)
T = TypeVar("T")
_HEADROOM_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all sequences of an engine share."""

    model: Model
    store: BlockStore
    compute: ComputeThread
    resident: ResidentStore
    rate: Rate
    root: bytes
    chunk_tokens: int

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.model.geometry.block_tokens


class Sequence:
    """A sequence that begins with `tokens` and may grow to `limit` tokens; its blocks are pushed to the nodes `hand_off` besides.

    The first `prompt` of its tokens were not generated (by default all that it begins with).

    Use: `gather`, then `fill` or `first_token`, then `append` and `next_token` in turn, at last `retire`.
    """

    def __init__(
        self,
        parts: Parts,
        tokens: tuple[int, ...],
        *,
        limit: int,
        sampling: Sampling,
        prompt: int | None = None,
        hand_off: tuple[str, ...] = (),
    ) -> None:
        self.chain = Chain(parts.root, parts.block_tokens, tokens)
        self.sources = TokenSources()
        self.limit = limit
        self._parts = parts
        self._sampling = sampling
        self._prompt = len(tokens) if prompt is None else prompt
        self._hand_off = hand_off
        self._cache: SequenceCache | None = None
        self._publisher: Publisher | None = None
        self._queue_ns = self._load_ns = self._compute_ns = self._sample_ns = 0

    @property
    def times(self) -> StageTimes:
        """Where the time went so far."""
        return StageTimes(queue_ns=self._queue_ns, load_ns=self._load_ns, compute_ns=self._compute_ns, sample_ns=self._sample_ns)

    @property
    def cache(self) -> SequenceCache:
        """The KV; there from `gather` to `retire`."""
        if self._cache is None:
            raise LocalError("this sequence holds no KV: it wasn't gathered, or it was retired")
        return self._cache

    @property
    def publisher(self) -> Publisher:
        """The pushes; there from `gather` on."""
        if self._publisher is None:
            raise LocalError("this sequence wasn't gathered")
        return self._publisher

    def queued(self, waited_ns: int) -> None:
        """`waited_ns` were spent waiting for admission."""
        self._queue_ns += waited_ns

    async def gather(self, *, usable: int, tail: bool, deadline_ns: int) -> None:
        """Take what this worker and the pool hold of the first `usable` tokens (with `tail`, of a partial last block too).

        What the pool can't deliver within the time a recomputation would take is left to compute.
        """
        chain, size = self.chain, self.chain.block_tokens
        capacity = min(self.limit, len(chain) + _HEADROOM_TOKENS)
        cache = self._parts.resident.take(chain.keys, chain.tokens)
        if cache is None:
            cache = self._parts.model.new_cache(capacity=capacity, limit=self.limit)
        else:
            await asyncio.to_thread(cache.fit, capacity=capacity, limit=self.limit)  # may copy a lot
        resident, first = cache.length, cache.length // size
        loaded = await self._load(cache, chain.with_tail() if tail else chain.keys, deadline_ns)
        if loaded:
            resident = first * size
            cache.truncate(resident)
            cache.advance(loaded)
        known = min(cache.length, usable)
        cache.truncate(known)
        self.sources = TokenSources(resident=min(resident, known), pool=max(0, known - resident), computed=len(chain) - known)
        # What came from the pool needs no push; what was resident may have left the pool since.
        self._publisher = Publisher(self._parts.store, chain, cache, first=0 if resident else loaded // size, also=self._hand_off)
        self._cache = cache
        self._publisher.offer(known)

    async def fill(self) -> None:
        """Compute the KV of the tokens that `gather` left."""
        for start, end in self._plan():
            await self._extend(start, end)

    async def first_token(self) -> Sampled:
        """`fill`, and the token after the last one. At least one token must be left to compute."""
        *before, (start, end) = self._plan()
        for chunk in before:
            await self._extend(*chunk)
        sampled = await self._predict(Kind.CHUNK, self.chain.tokens[start:end])
        self.publisher.offer(end)
        return sampled

    async def next_token(self) -> Sampled:
        """Compute the KV of the last token, the only one that lacks it, and the token after it."""
        sampled = await self._predict(Kind.STEP, self.chain.tokens[-1:])
        self.publisher.offer(self.cache.length)
        return sampled

    def append(self, token: int) -> None:
        """`token` is the next one."""
        self.chain.append(token)

    async def retire(self, deadline_ns: int) -> None:
        """Let the pushes end, then leave the KV to later requests of this worker. Nobody else may use the sequence any more."""
        cache, self._cache = self._cache, None
        if cache is not None and await self.publisher.drain(deadline_ns):
            self._parts.resident.put(self.chain.keys, self.chain.tokens, cache)

    def _plan(self) -> list[tuple[int, int]]:
        return chunk_plan(self.cache.length, len(self.chain), self._parts.chunk_tokens)

    async def _extend(self, start: int, end: int) -> None:
        cache, tokens = self.cache, self.chain.tokens[start:end]
        ran = await self._run(Kind.CHUNK, lambda: self._parts.model.extend(cache, tokens))
        self._parts.rate.add(len(tokens), ran.took_ns)
        self.publisher.offer(end)

    async def _predict(self, kind: Kind, tokens: list[int]) -> Sampled:
        """Compute `tokens`, choose the one after the whole chain."""
        cache, model, position = self.cache, self._parts.model, len(self.chain)
        generated = self.chain.tokens[self._prompt :] if self._sampling.adjusts else ()

        def work() -> tuple[Sampled, int]:
            scores = model.predict(cache, tokens)
            began_ns = time.monotonic_ns()
            return sample(scores.numpy(), self._sampling, position, generated), time.monotonic_ns() - began_ns

        ran = await self._run(kind, work)
        sampled, sample_ns = ran.value
        self._sample_ns += sample_ns
        self._compute_ns -= sample_ns
        self._parts.rate.add(len(tokens), ran.took_ns - sample_ns)
        return sampled

    async def _run(self, kind: Kind, work: Callable[[], T]) -> Ran[T]:
        ran = await self._parts.compute.run(kind, work)
        self._queue_ns += ran.waited_ns
        self._compute_ns += ran.took_ns
        return ran

    async def _load(self, cache: SequenceCache, keys: list[BlockKey], deadline_ns: int) -> int:
        """Load the blocks of `keys` behind the full ones in `cache` into it; the number of tokens that came.

        When we are cancelled meanwhile the store's call is cancelled too, and whatever it still delivers is not written.
        """
        first = cache.length // self.chain.block_tokens
        counts = self.chain.counts(first, len(keys))
        if first * self.chain.block_tokens + sum(counts) <= cache.length:
            return 0
        began_ns = time.monotonic_ns()
        wanted = True

        def sink(index: int, payload: Payload) -> None:
            if wanted:
                cache.write_block(index, counts[index - first], payload)

        end_ns = min(deadline_ns, began_ns + self._parts.rate.load_budget_ns(sum(counts)))
        call = asyncio.ensure_future(self._parts.store.load(keys, first, counts, sink, deadline_ns=end_ns))
        try:
            done = await asyncio.shield(call)
        except asyncio.CancelledError:
            wanted = False
            call.add_done_callback(_look)
            call.cancel()
            raise
        self._load_ns += time.monotonic_ns() - began_ns
        return sum(counts[:done])


def _look(call: "asyncio.Future[int]") -> None:
    """Look at the end of a call nobody waits for, so that a failure is told once."""
    if not call.cancelled() and (error := call.exception()) is not None:
        log.warning("a load that nobody waits for any more failed: %s", error)
