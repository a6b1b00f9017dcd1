"""The engine: requests in, events out, from asyncio.

Theory of one request. It enters (`Admission`: a place and the memory it may need), gathers what this worker and the pool
hold of its tokens, computes the rest chunk by chunk on the one compute thread, and pushes finished blocks while it goes
on. A prefill ends when the pool has it all; a decode then takes turns with the others, one token each. However a request
ends, its pushes are finished in the background, its KV stays resident for the next turn, and only then is its place given up.

Nothing here depends on the pool: what it doesn't deliver in time is computed, what it doesn't take is not kept.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvpool.clock import seconds_left
from kvpool.engine.admission import Admission
from kvpool.engine.compute import ComputeThread
from kvpool.engine.model import Model
from kvpool.engine.prefill import Rate
from kvpool.engine.resident import ResidentStore
from kvpool.engine.sampling import Sampled
from kvpool.engine.scopes import Scopes
from kvpool.engine.sequence import Parts, Sequence
from kvpool.engine.settings import EngineSettings
from kvpool.engine.store import BlockStore, NullStore
from kvpool.errors import ClosedError, ConfigError, KvpoolError
from kvpool.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillEvent,
    PrefillRequest,
    Published,
    Sampling,
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


class Engine:
    """Serves prefills and decodes of one model. Lives on one event loop; close it."""

    def __init__(self, model: Model, store: BlockStore, settings: EngineSettings) -> None:
        self._model = model
        self._admission = Admission(max_active=settings.max_active, max_queued=settings.max_queued, max_bytes=settings.kv_bytes)
        self.context_tokens = min(model.context_tokens, settings.kv_bytes // model.geometry.bytes_per_token)
        self._parts = Parts(
            model=model,
            store=store,
            compute=ComputeThread(settings.threads),
            resident=ResidentStore(settings.resident_bytes),
            rate=Rate(),
            root=model.namespace.root(),
            chunk_tokens=settings.chunk_tokens,
        )
        self._scopes = Scopes(self._parts)
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._finished = self._failed = 0

    async def prefill(self, request: PrefillRequest, *, deadline_ns: int = NO_DEADLINE_NS) -> AsyncIterator[PrefillEvent]:
        """`FirstToken`, then `Published`. `deadline_ns` (monotonic) bounds what is waited for besides computing.

        Raises `ConfigError` for a request this model can't serve, `OverloadedError`, `ClosedError`.
        """
        self._check(request.prompt)
        sequence = await self._enter(request, request.prompt, limit=len(request.prompt), hand_off=request.hand_off)
        try:
            await sequence.gather(usable=len(request.prompt) - 1, tail=False, deadline_ns=deadline_ns)
            first = await sequence.first_token()
            publisher = sequence.publisher
            publisher.offer_tail()
            yield FirstToken(token=first.token, sources=sequence.sources, times=sequence.times, logprobs=first.logprobs)
            await publisher.drain(min(deadline_ns, time.monotonic_ns() + self._publish_ns(len(request.prompt))))
            self._finished += 1
            yield Published(tokens=publisher.held, blocks_written=publisher.written)
        except KvpoolError:
            self._failed += 1
            raise
        finally:
            self._leave(sequence)

    async def decode(self, request: DecodeRequest, *, deadline_ns: int = NO_DEADLINE_NS) -> AsyncIterator[DecodeEvent]:
        """`Started`, `TokenOut`..., `Finished` (alone when nothing is left to generate). Otherwise like `prefill`."""
        prompt, generated = request.prompt, request.generated
        self._check(prompt)
        self._check_generated(request)
        end = min(request.max_tokens, self.context_tokens - len(prompt))
        if generated and (reason := _reason(request, generated[-1], len(generated), end)):
            yield Finished(reason=reason)
            return
        sequence = await self._enter(request, prompt + generated[:-1], limit=len(prompt) + end)
        try:
            async with aclosing(self._decode(request, sequence, end, deadline_ns)) as events:
                async for event in events:
                    yield event
        except KvpoolError:
            self._failed += 1
            raise
        finally:
            self._leave(sequence)

    async def _decode(self, request: DecodeRequest, sequence: Sequence, end: int, deadline_ns: int) -> AsyncGenerator[DecodeEvent, None]:
        """Tokens until one of them is a reason to stop, at the latest when `end` are generated."""
        known, count = len(sequence.chain), len(request.generated)
        fresh: Sampled | None = None
        if count:
            await sequence.gather(usable=known, tail=True, deadline_ns=deadline_ns)
            await sequence.fill()
            sequence.append(request.generated[-1])
        else:
            await sequence.gather(usable=known - 1, tail=True, deadline_ns=deadline_ns)
            fresh = await sequence.first_token()
        yield Started(sources=sequence.sources, times=sequence.times)
        reason = None
        while reason is None:
            sampled = fresh if fresh is not None else await sequence.next_token()
            fresh = None
            sequence.append(sampled.token)
            count += 1
            yield TokenOut(token=sampled.token, logprobs=sampled.logprobs)
            reason = _reason(request, sampled.token, count, end)
        await sequence.publisher.drain(min(deadline_ns, time.monotonic_ns() + SETTLE_NS))
        self._finished += 1
        yield Finished(reason=reason)

    async def warm_up(self) -> None:
        """Compute a chunk for nobody, so that the first request finds everything set up and the speed is known."""
        tokens = tuple(i % self._model.vocabulary for i in range(min(self._parts.chunk_tokens, self.context_tokens - 1, 128)))
        apart = replace(self._parts, store=NullStore(), resident=ResidentStore(0))
        quiet = Sequence(apart, tokens, limit=len(tokens), sampling=Sampling())
        await quiet.gather(usable=0, tail=False, deadline_ns=time.monotonic_ns())
        await quiet.fill()

    def status(self, *, role: str, model: str) -> WorkerStatus:
        """What the engine is doing, under the `role` and served `model` name of its worker."""
        return WorkerStatus(
            role=role,
            model=model,
            active_requests=self._admission.active,
            queued_requests=self._admission.queued,
            finished_requests=self._finished,
            failed_requests=self._failed,
            prefill_tokens_per_s=self._parts.rate.tokens_per_s,
            resident_tokens=self._parts.resident.tokens,
            reaches=self._parts.store.reaches(),
        )

    async def close(self, deadline_ns: int) -> None:
        """Refuse what comes, fail what waits, let pushes end until `deadline_ns`, stop the compute thread."""
        self._closed = True
        ended = await self._parts.compute.close(deadline_ns)
        if self._background:
            await asyncio.wait(self._background, timeout=seconds_left(deadline_ns))
        self._parts.resident.clear()
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

    def _check_ids(self, tokens: tuple[int, ...]) -> None:
        if min(tokens) < 0 or max(tokens) >= self._model.vocabulary:
            raise ConfigError(f"token ids must be between 0 and {self._model.vocabulary - 1}; is this the right model's tokenizer?")

    async def _enter(
        self, request: PrefillRequest | DecodeRequest, tokens: tuple[int, ...], *, limit: int, hand_off: tuple[str, ...] = ()
    ) -> Sequence:
        if self._closed:
            raise ClosedError("the engine was closed")
        began_ns = time.monotonic_ns()
        await self._admission.enter(limit * self._model.geometry.bytes_per_token)
        parts, prompt = self._scopes.parts(request.scope), len(request.prompt)
        sequence = Sequence(parts, tokens, limit=limit, sampling=request.sampling, prompt=prompt, hand_off=hand_off)
        sequence.queued(time.monotonic_ns() - began_ns)
        return sequence

    def _leave(self, sequence: Sequence) -> None:
        """Retire `sequence` in the background: whoever consumed it may be gone."""
        self._spawn(self._retire(sequence))

    async def _retire(self, sequence: Sequence) -> None:
        try:
            await sequence.retire(time.monotonic_ns() + RETIRE_NS)
        finally:
            self._admission.leave(sequence.limit * self._model.geometry.bytes_per_token)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _reason(request: DecodeRequest, last: int, count: int, end: int) -> FinishReason | None:
    """Why generation stops after token `last`, the `count`th; None if it goes on."""
    if last in request.stop_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if count >= end else None
