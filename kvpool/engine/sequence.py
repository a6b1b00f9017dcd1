"""One request inside the worker: its tokens, what the scheduler knows of it, where its KV came from, and what its reader gets."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvpool.block import BlockKey
from kvpool.engine.attention.build import make_reader
from kvpool.engine.attention.reader import SessionReader
from kvpool.engine.attention.settings import AttentionSettings
from kvpool.engine.chain import Chain
from kvpool.engine.coming import Part
from kvpool.engine.gather import Load, Streaming, stream
from kvpool.engine.model import Model
from kvpool.engine.paged.attention import Segment
from kvpool.engine.patience import Patience
from kvpool.engine.prefill import Rate
from kvpool.engine.publisher import Memory, Publisher
from kvpool.engine.sampling import Sampled, Scores, sample
from kvpool.engine.schedule.work import Turn, Work
from kvpool.engine.sharing import Sharing
from kvpool.engine.store import BlockStore
from kvpool.engine.streaming import LayerStore
from kvpool.errors import KvpoolError, LocalError
from kvpool.request import FinishReason, Sampling, StageTimes, TokenSources

log = logging.getLogger(__name__)

AHEAD = 32
"""Tokens that may wait for a reader; a sequence whose reader is that far behind is not computed further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What all sequences of an engine share."""

    model: Model
    store: BlockStore
    memory: Memory
    sharing: Sharing
    rate: Rate
    loads: Rate
    root: bytes

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.model.geometry.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is wanted: `generated` of at most `max_generated` tokens are there already; a prefill wants one, and its blocks in the pool.

    The blocks are pushed to the nodes `hand_off` besides. `attention`: the technique that reads behind the prompt, if any.
    """

    prompt: tuple[int, ...]
    generated: tuple[int, ...] = ()
    max_generated: int = 1
    stop_tokens: tuple[int, ...] = ()
    sampling: Sampling
    prefill: bool = False
    hand_off: tuple[str, ...] = ()
    attention: AttentionSettings | None = None
    deadline_ns: int

    @property
    def usable(self) -> int:
        """Tokens that may be taken from others: at least the last one is computed, and what the technique must see of the prompt."""
        if self.attention is None:
            return len(self.prompt) + len(self.generated) - 1
        seen = self.attention.prompt_queries
        return 0 if seen is None else max(0, len(self.prompt) - max(1, seen))

    @property
    def limit(self) -> int:
        """Tokens that may come to have KV: the last one generated needs none."""
        return len(self.prompt) + self.max_generated - 1

    def reason(self, last: int, count: int) -> FinishReason | None:
        """Why generation stops after token `last`, the `count`th; None if it goes on."""
        if last in self.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count >= self.max_generated else None


class Sequence:
    """`ask` being served. Moved on by the driver (`gather`, `segment`, `computed`, `fail`), read with `token`."""

    def __init__(self, parts: Parts, ask: Ask) -> None:
        self.ask = ask
        self.sources = TokenSources()
        self.placed = False
        self.work: Work
        self._parts = parts
        size = parts.block_tokens
        shared = ask.generated[:-1] if ask.attention is None else ()
        self.chain = Chain(parts.root, size, (*ask.prompt, *shared))
        keys = self.chain.keys if ask.prefill else self.chain.with_tail()
        if ask.attention is not None:
            keys = keys[: -(-ask.usable // size)]
        self._findable = list(zip(keys, self.chain.counts(0, len(keys)), strict=True))
        for token in ask.generated[len(shared) :]:
            self.chain.append(token)
        total = len(self.chain)
        self.work = Work(keys=tuple(keys), known=total, usable=ask.usable, limit=max(total, ask.limit), deadline_ns=ask.deadline_ns)
        self._reader: SessionReader | None = None
        self._begin_reading()
        self._count = len(ask.generated)
        self._reason: FinishReason | None = None
        self._publisher: Publisher | None = None
        self._tokens: deque[Sampled] = deque()
        self._error: KvpoolError | None = None
        self._came = asyncio.Event()
        self._named = self._here = 0
        self._part = Part(self.work)
        self._streaming: Streaming | None = None
        self._coming: list[tuple[int, BlockKey, int]] = []
        self._idle_ns = time.monotonic_ns()
        self._queue_ns = self._load_ns = self._compute_ns = self._sample_ns = 0

    @property
    def times(self) -> StageTimes:
        """Where the time went so far."""
        return StageTimes(queue_ns=self._queue_ns, load_ns=self._load_ns, compute_ns=self._compute_ns, sample_ns=self._sample_ns)

    @property
    def publisher(self) -> Publisher:
        """The pushes; there once the sequence was gathered."""
        if self._publisher is None:
            raise LocalError("this sequence wasn't gathered")
        return self._publisher

    async def gathered(self) -> None:
        """Wait until what there was is there. Raises what went wrong."""
        await self._until(lambda: self._publisher is not None)

    async def token(self) -> Sampled:
        """The next token, when it is known. Raises what went wrong."""
        await self._until(lambda: bool(self._tokens))
        return self._tokens.popleft()

    @property
    def over(self) -> FinishReason | None:
        """Why the last token that was read is the last of all; None while more may come."""
        return None if self._tokens else self._reason

    @property
    def slack(self) -> bool:
        """Whether the reader keeps up."""
        return len(self._tokens) < AHEAD

    def fail(self, error: KvpoolError) -> None:
        """Nothing more comes: `error` is why."""
        self._error = error
        self._came.set()

    async def settle(self, deadline_ns: int) -> None:
        """Wait until its pushes have ended, if it had any."""
        if self._publisher is not None:
            await self._publisher.drain(deadline_ns)

    def preempted(self) -> None:
        """It has lost its blocks, and gathers again when it is admitted; a technique begins anew with the prompt."""
        self.gone()
        if self._reader is None:
            size = self._parts.block_tokens
            self._findable = [(key, size) for key in self.chain.keys]
            self.work.keys = tuple(self.chain.keys)
        self._begin_reading()

    async def gather(self) -> int:
        """Take what the worker (in the table already) and the pool hold of the tokens so far; how many tokens have KV then.

        What the pool can't deliver within the time a recomputation would take is left to compute.
        """
        work, size, memory, sharing = self.work, self._parts.block_tokens, self._parts.memory, self._parts.sharing
        keys, part = list(work.keys), Part(work)
        self._part = part
        brings = self.chain.keys if self._reader is None else self.chain.keys[: len(self.ask.prompt) // size]
        worth = await sharing.follow(part, brings, self._patience, self.ask.deadline_ns)
        now_ns = time.monotonic_ns()
        self._queue_ns += now_ns - self._idle_ns
        here = work.table.tokens
        first = here // size
        wanted = self._findable[first:] if here < work.usable and worth else []
        reached = here
        if wanted:
            counts = [count for _, count in wanted]
            patience = self._patience(first)
            store = self._parts.store
            whole = work.usable // size  # the block that is written into, a copy then, can't come meanwhile
            if isinstance(store, LayerStore) and not self.ask.generated and not work.preempted and whole > first:
                self._streaming = await stream(store, memory, work.table, keys[:whole], counts[: whole - first], patience.end_ns)
            if self._streaming is not None:
                came, work.alone, part.loading = self._streaming.blocks, True, True
                self._coming = [(index, *block) for index, block in enumerate(wanted[:came], first)]
            else:
                came = await Load(store, memory, sharing, part, keys, counts, patience).came()
            reached = max(here, first * size + sum(counts[:came]))
            took_ns = time.monotonic_ns() - now_ns
            self._load_ns += took_ns
            if self._streaming is None:
                self._parts.loads.add(sum(counts[:came]), took_ns)
        have = min(work.usable, reached)
        self._here = here
        if self._publisher is None:
            self._begin(min(here, have), have, 0 if here else reached // size)
        self._idle_ns = time.monotonic_ns()
        return have

    def _patience(self, first: int) -> Patience:
        """For a load of all blocks from `first` on that begins now."""
        counts = [count for _, count in self._findable[first:]]
        budget_ns = self._parts.rate.load_budget_ns(sum(counts))
        return Patience(blocks=len(counts), began_ns=time.monotonic_ns(), compute_ns=budget_ns, deadline_ns=self.ask.deadline_ns)

    def ready(self) -> None:
        """The scheduler knows what `gather` brought."""
        self._named = self.work.table.tokens // self._parts.block_tokens
        if self._streaming is None:
            self.publisher.offer(self.work.table, self._pure)
        self._came.set()

    def gone(self) -> None:
        """It has left, or lost its blocks: others have no more to expect of it."""
        self.stop_streaming()
        self._parts.sharing.end(self._part)

    def stop_streaming(self) -> None:
        """Nobody waits for its layers any more."""
        if self._streaming is not None:
            self._streaming.cancel()
            self._parts.sharing.loaded(self._part)
        self._streaming, self._coming, self.work.alone = None, [], False

    def lost(self) -> None:
        """Its layers didn't come: none of them counts, and all behind what was here is computed."""
        self.stop_streaming()
        self._parts.memory.manager.truncate(self.work.table, self._here)
        self._named = self._here // self._parts.block_tokens
        self._begin_reading()
        self._begin(self._here, self._here, 0)
        log.warning("a prefix that was loaded layer by layer didn't come in time; it is computed")

    def segment(self, turn: Turn) -> Segment:
        """What the next pass computes of it."""
        gate = None if self._streaming is None else self._streaming.gate
        tokens = self.chain.tokens[turn.start : turn.end]
        scores = turn.last and self.work.known == len(self.chain)
        return Segment(self.work.table.blocks, turn.start, tokens, scores=scores, reader=self._reader, gate=gate, owner=self.work.order)

    def sample(self, scores: Scores) -> Sampled:
        """The token after all there are, from their scores ``[vocabulary]``. Called by the compute thread."""
        began_ns = time.monotonic_ns()
        sampling, prompt = self.ask.sampling, len(self.ask.prompt)
        sampled = sample(scores, sampling, len(self.chain), self.chain.tokens[prompt:] if sampling.adjusts else ())
        self._sample_ns += time.monotonic_ns() - began_ns
        return sampled

    def computed(self, sampled: Sampled | None, began_ns: int, took_ns: int) -> bool:
        """Its turn has been computed, and chose `sampled` if it was the last of the tokens so far. True when that ends it."""
        self._queue_ns += max(0, began_ns - self._idle_ns)
        if self._streaming is not None:  # the pass has been through the last layer, so all have come
            self._load_ns += self._streaming.gate.waited_ns
            took_ns -= self._streaming.gate.waited_ns
            self._name_found(self._coming)
            self._streaming, self._coming, self.work.alone = None, [], False
            self._parts.sharing.loaded(self._part)
        self._compute_ns += took_ns
        self._idle_ns = time.monotonic_ns()
        self._name()
        if sampled is None:
            self._parts.sharing.moved()
        elif not self._part.gone:
            self._parts.sharing.end(self._part)
        self.publisher.offer(self.work.table, self._pure)
        if sampled is None:
            if not self.work.pending:  # a technique goes through what was generated before, token by token
                self.work.known += 1
            return False
        self._count += 1
        self._reason = self.ask.reason(sampled.token, self._count)
        if self.ask.prefill:
            self._name_tail()
            self.publisher.offer_tail(self.work.table)
        elif self._reason is None:
            self.chain.append(sampled.token)
            self.work.known += 1
        self._tokens.append(sampled)
        self._came.set()
        return self._reason is not None

    def _begin(self, resident: int, have: int, pushed: int) -> None:
        """`have` tokens needn't be computed, of which `resident` were here; the first `pushed` blocks are in the pool."""
        filled = len(self.ask.prompt) + max(0, len(self.ask.generated) - 1)  # tokens whose KV others may have
        self.sources = TokenSources(resident=resident, pool=have - resident, computed=filled - have)
        # What came from the pool needs no push; what was here may have left the pool since.
        self._publisher = Publisher(self._parts.store, self.chain, self._parts.memory, pushed, self.ask.hand_off)

    def _begin_reading(self) -> None:
        """Nothing is computed yet, as far as a technique is concerned: it sees the prompt, then each token in a pass of its own."""
        if self.ask.attention is not None:
            prompt = len(self.ask.prompt)
            self._reader = make_reader(self.ask.attention, frequencies=self._parts.model.frequencies, prompt=prompt)
            self.work.known, self.work.usable = prompt, self.ask.usable

    @property
    def _pure(self) -> int:
        """Leading tokens with KV that is what their keys stand for, so that others may have it."""
        tokens = self.work.table.tokens
        return tokens if self._reader is None else self._reader.pure(tokens)

    def _name_found(self, found: list[tuple[int, BlockKey, int]]) -> None:
        for index, key, count in found:
            self._name_one(index, key, count)
        self._parts.memory.manager.pooled(self.work.table.blocks[index] for index, *_ in found)

    def _name(self) -> None:
        """Others may find the blocks that are full and pure."""
        size = self._parts.block_tokens
        for index in range(self._named, self._pure // size):
            self._name_one(index, self.chain.keys[index], size)
        there = slice(self._named, self.publisher.first)  # loaded, and then written into: the last block of a prompt
        self._parts.memory.manager.pooled(self.work.table.blocks[there])
        self._named = self._pure // size

    def _name_tail(self) -> None:
        table, size = self.work.table, self._parts.block_tokens
        for key in self.chain.with_tail()[len(self.chain.keys) :]:
            self._name_one(table.tokens // size, key, table.tokens % size)

    def _name_one(self, index: int, key: BlockKey, count: int) -> None:
        before = self.chain.keys[index - 1] if index else None
        self._parts.memory.manager.name(key, self.work.table.blocks[index], count, before, index * self._parts.block_tokens)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._error is not None:
                raise self._error
            self._came.clear()
            await self._came.wait()
