"""The engine: requests in, events out, from asyncio.

Theory of one request. It waits for a place and blocks (`schedule`), gathers what this worker and the pool hold of its tokens, and has
the rest computed, some tokens in each pass, in one pass with all others (`driver.py`), while its finished blocks are pushed. A prefill ends
when the pool has it all, a decode when its last token is out. However a request ends, its blocks are named and stay for the next turn as
long as there is room, and its place is given up when its pushes are done.

Nothing here depends on the pool: what it doesn't deliver in time is computed, what it doesn't take is not kept.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from kvpool.clock import seconds_left
from kvpool.engine.attention.build import check_attention
from kvpool.engine.attention.settings import AttentionSettings, parse_attention
from kvpool.engine.compute import ComputeThread
from kvpool.engine.device.place import make_store
from kvpool.engine.driver import Driver, Machine
from kvpool.engine.events import WorkerEvents
from kvpool.engine.model import Model
from kvpool.engine.paged.blocks import BlockManager
from kvpool.engine.paged.kept import LOADED
from kvpool.engine.prefill import Rate
from kvpool.engine.publisher import Memory
from kvpool.engine.schedule.scheduler import Scheduler
from kvpool.engine.scopes import Scopes
from kvpool.engine.sequence import Ask, Parts, Sequence
from kvpool.engine.settings import EngineSettings
from kvpool.engine.sharing import Sharing
from kvpool.engine.store import BlockStore
from kvpool.errors import ClosedError, ConfigError, KvpoolError
from kvpool.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FirstToken,
    PrefillEvent,
    PrefillRequest,
    Published,
    Scope,
    Started,
    TokenOut,
    WorkerStatus,
)
from kvpool.units import MS, SECOND

log = logging.getLogger(__name__)

NO_DEADLINE_NS = 2**63 - 1
PUBLISH_FLOOR_NS, PUBLISH_CEILING_NS = 2 * SECOND, 10 * SECOND
"""Between these a prefill waits for the pool to take its blocks as long as the decode worker would need to compute them."""
SETTLE_NS = 250 * MS
"""How long the end of a decode waits for its last pushes, so that the next turn finds them."""
RETIRE_NS = 5 * SECOND
TOUCHED_TOKENS = 2048
"""Tokens whose KV memory is taken before the first request: it took a first load longer to get it than to fill it."""


class Engine:
    """Serves prefills and decodes of one model. Lives on one event loop; close it."""

    def __init__(self, model: Model, store: BlockStore, settings: EngineSettings) -> None:
        check_attention(settings.attention, model.frequencies)
        self._attention = settings.attention
        self._model = model
        self.context_tokens = min(model.context_tokens, settings.kv_bytes // model.geometry.bytes_per_token)
        self.events = WorkerEvents()
        """What is resident, as it changes."""
        self._rate, loads = Rate(), Rate()
        manager = _manager(model, settings, self.context_tokens, self.events, lambda: _share(self._rate, loads))
        self.events.presses(lambda: manager.pressure)
        self._kv = make_store(model.geometry, manager.capacity, model.device, settings.layout)
        self._scheduler = Scheduler(
            manager,
            max_active=settings.max_active,
            max_queued=settings.max_queued,
            chunk_tokens=settings.chunk_tokens,
            target_ns=round(settings.tpot_target_ms * MS),
        )
        self._compute = ComputeThread(settings.threads)  # last: nobody closes it if something above is refused
        self._driver = Driver(Machine(model, self._kv, self._compute, self._rate, settings.steady), self._scheduler)
        memory = Memory(self._kv, manager, self._driver.wake)
        sharing = Sharing(manager, self._driver.wake)
        self._parts = Parts(
            model=model, store=store, memory=memory, sharing=sharing, rate=self._rate, loads=loads, root=model.namespace.root()
        )
        self._scopes = Scopes(self._parts)
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._finished = self._failed = 0

    async def prefill(self, request: PrefillRequest, *, deadline_ns: int = NO_DEADLINE_NS) -> AsyncIterator[PrefillEvent]:
        """`FirstToken`, then `Published`. `deadline_ns` (monotonic) bounds what is waited for besides computing.

        Raises `ConfigError` for a request this model can't serve, `OverloadedError`, `DeadlineError`, `ClosedError`.
        """
        self._check(request.prompt)
        ask = Ask(prompt=request.prompt, sampling=request.sampling, prefill=True, hand_off=tuple(request.hand_off), deadline_ns=deadline_ns)
        sequence = self._enter(ask, request.scope)
        try:
            first = await sequence.token()
            yield FirstToken(token=first.token, sources=sequence.sources, times=sequence.times, logprobs=first.logprobs)
            publisher = sequence.publisher
            await publisher.drain(min(deadline_ns, time.monotonic_ns() + self._publish_ns(len(request.prompt))))
            self._finished += 1
            yield Published(tokens=publisher.held, blocks_written=publisher.written)
        except KvpoolError:
            self._failed += 1
            raise
        finally:
            self._leave(sequence)

    async def decode(self, request: DecodeRequest, *, deadline_ns: int = NO_DEADLINE_NS) -> AsyncIterator[DecodeEvent]:
        """`Started`, `TokenOut`..., `Finished` (alone when nothing is left to generate). Otherwise like `prefill`.

        With a technique that leaves tokens out, what is in `generated` is computed again, a token per pass, as whoever made it did.
        """
        prompt, generated = request.prompt, request.generated
        self._check(prompt)
        self._check_generated(request)
        ask = Ask(
            prompt=prompt,
            generated=generated,
            max_generated=min(request.max_tokens, self.context_tokens - len(prompt)),
            stop_tokens=request.stop_tokens,
            sampling=request.sampling,
            attention=self._attention_of(request),
            deadline_ns=deadline_ns,
        )
        if generated and (reason := ask.reason(generated[-1], len(generated))):
            yield Finished(reason=reason)
            return
        sequence = self._enter(ask, request.scope)
        try:
            async with aclosing(self._decode(sequence, deadline_ns)) as events:
                async for event in events:
                    yield event
        except KvpoolError:
            self._failed += 1
            raise
        finally:
            self._leave(sequence)

    async def _decode(self, sequence: Sequence, deadline_ns: int) -> AsyncGenerator[DecodeEvent, None]:
        """Tokens until one of them is a reason to stop."""
        await sequence.gathered()
        early = sequence.ask.generated and not sequence.sources.computed  # all there is to know is known before a token is computed
        if early:
            yield Started(sources=sequence.sources, times=sequence.times)
        sampled = await sequence.token()
        if not early:
            yield Started(sources=sequence.sources, times=sequence.times)
        while True:
            yield TokenOut(token=sampled.token, logprobs=sampled.logprobs)
            if reason := sequence.over:
                break
            sampled = await sequence.token()
            self._driver.wake()  # its reader keeps up
        await sequence.publisher.drain(min(deadline_ns, time.monotonic_ns() + SETTLE_NS))
        self._finished += 1
        yield Finished(reason=reason)

    async def warm_up(self) -> None:
        """Compute a chunk for nobody, so that the first request finds everything set up, memory too, and the speed is known."""
        await self._compute.run(lambda: self._kv.touch(TOUCHED_TOKENS))
        tokens = [i % self._model.vocabulary for i in range(min(self._scheduler.chunk_tokens, self.context_tokens - 1, 128))]
        alone = self._model.new_cache(capacity=len(tokens), limit=len(tokens))
        ran = await self._compute.run(lambda: self._model.extend(alone, tokens))
        self._rate.add(len(tokens), ran.took_ns)

    def status(self, *, role: str, model: str) -> WorkerStatus:
        """What the engine is doing, under the `role` and served `model` name of its worker."""
        manager = self._scheduler.manager
        return WorkerStatus(
            role=role,
            model=model,
            active_requests=self._scheduler.active,
            queued_requests=len(self._scheduler.waiting),
            finished_requests=self._finished,
            failed_requests=self._failed,
            prefill_tokens_per_s=self._rate.tokens_per_s,
            resident_tokens=manager.kept * manager.block_tokens,
            reaches=self._parts.store.reaches(),
        )

    @property
    def busy(self) -> bool:
        """Whether any request is active, waits, or has pushes under way."""
        return self._scheduler.active > 0 or len(self._scheduler.waiting) > 0

    @property
    def preemptions(self) -> int:
        """How often a sequence gave way so far."""
        return self._scheduler.preemptions

    @property
    def gathered_bytes(self) -> int:
        """Bytes of KV copied so far because a sequence doesn't lie in one piece."""
        return self._kv.gathered_bytes

    async def close(self, deadline_ns: int) -> None:
        """Refuse what comes, fail what waits, let pushes end until `deadline_ns`, stop the compute thread."""
        self._closed = True
        self._driver.close()
        ended = await self._compute.close(deadline_ns)
        if self._background:
            await asyncio.wait(self._background, timeout=seconds_left(deadline_ns))
        self._scheduler.manager.clear()
        self.events.close()
        if not ended or self._background:
            log.warning("closed with %d pushes unfinished%s", len(self._background), "" if ended else " and a pass still running")

    def _publish_ns(self, tokens: int) -> int:
        return min(PUBLISH_CEILING_NS, max(PUBLISH_FLOOR_NS, self._parts.rate.load_budget_ns(tokens)))

    def _check(self, prompt: tuple[int, ...]) -> None:
        """Refuse a prompt that can't be continued by even one token."""
        if not prompt:
            raise ConfigError("the prompt is empty; give at least one token")
        if len(prompt) >= self.context_tokens:
            raise ConfigError(f"the prompt has {len(prompt)} tokens; this model's context is {self.context_tokens}, the answer included")
        self._check_ids(prompt)

    def _check_generated(self, request: DecodeRequest) -> None:
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {request.max_tokens}")
        total = len(request.prompt) + len(request.generated)
        if total > self.context_tokens:
            raise ConfigError(f"prompt and generated tokens are {total} together; this model's context is {self.context_tokens}")
        if request.generated:
            self._check_ids(request.generated)

    def _attention_of(self, request: DecodeRequest) -> AttentionSettings | None:
        """What the request wants, or the worker's own."""
        if not request.attention:
            return self._attention
        settings = parse_attention(request.attention)
        check_attention(settings, self._model.frequencies)
        return settings

    def _check_ids(self, tokens: tuple[int, ...]) -> None:
        if min(tokens) < 0 or max(tokens) >= self._model.vocabulary:
            raise ConfigError(f"token ids must be between 0 and {self._model.vocabulary - 1}; is this the right model's tokenizer?")

    def _enter(self, ask: Ask, scope: Scope) -> Sequence:
        if self._closed:
            raise ClosedError("the engine was closed")
        sequence = Sequence(self._scopes.parts(scope), ask)
        self._driver.submit(sequence)
        return sequence

    def _leave(self, sequence: Sequence) -> None:
        """Retire `sequence` in the background: whoever consumed it may be gone."""
        if self._driver.leave(sequence):
            self._spawn(self._retire(sequence))

    async def _retire(self, sequence: Sequence) -> None:
        """Let the pushes end; the blocks they hold and the place are free then."""
        try:
            await sequence.settle(time.monotonic_ns() + RETIRE_NS)
        finally:
            self._driver.retired()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _manager(
    model: Model, settings: EngineSettings, context_tokens: int, listener: WorkerEvents, load_share: Callable[[], float]
) -> BlockManager:
    """Blocks for the active sequences, as many as they can come to need, and for those that stay; one to spare for a copy."""
    geometry = model.geometry
    block_bytes = geometry.bytes_per_token * geometry.block_tokens
    most = settings.max_active * (context_tokens // geometry.block_tokens + 2)
    keep = settings.resident_bytes // block_bytes
    active = max(1, min(settings.kv_bytes // block_bytes, most))
    capacity = active + min(keep, 4 * most) + 1
    return BlockManager(capacity=capacity, block_tokens=geometry.block_tokens, keep=keep, listener=listener, load_share=load_share)


def _share(computing: Rate, loading: Rate) -> float:
    """What loading a token takes of the time that computing one does."""
    return computing.tokens_per_s / loading.tokens_per_s if computing.tokens_per_s and loading.tokens_per_s else LOADED
