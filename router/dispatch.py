"""One request's way through the cluster, whatever happens to the workers meanwhile.

::

    prefill ── FirstToken ──▶ (token) ── Published ──▶ decode ── Started, TokenOut... ──▶ (tokens) ── Finished
       │ none alive, or all failed                        ▲   │ failed after k tokens
       └──────────────────────────────────────────────────┘   └──▶ another decode worker, with prompt + tokens so far

Who is to decode is planned when the prefill is sent, so that the prefill worker's blocks can be pushed there (`handoff.py`).

Sampling depends on (seed, position) only, so whoever continues continues with the same tokens, and a token once yielded
is never asked for again. A worker that failed is excluded from this request, as this incarnation. When nobody is left the request waits for
the cluster to change, and every few seconds asks the excluded whether they answer again (they may only have been
stopped, or the network cut). It ends with its last token, with its deadline, or after `max_failures` failed attempts.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from kvpool.block import BlockKey, chain_keys
from kvpool.clock import Clock
from kvpool.errors import ConfigError, DeadlineError, KvpoolError, ProtocolError, UnavailableError
from kvpool.policy.routing import WorkerRef
from kvpool.request import (
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillEvent,
    PrefillRequest,
    Published,
    Started,
    TokenOut,
    TokenSources,
)
from kvpool.units import SECOND
from router.calls import Call, Calls
from router.fleet import Fleet
from router.handoff import Planned, nodes_beside
from router.index import PrefixIndex
from router.job import Job, Trace
from router.policy import Candidate, choose
from router.probe import GuardedProbe
from router.settings import Limits
from router.watch import Watch
from router.worker import Worker

log = logging.getLogger("router.dispatch")

_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 5.0


class Dispatcher:
    """Runs jobs on the fleet."""

    def __init__(self, *, fleet: Fleet, index: PrefixIndex, probe: GuardedProbe, clock: Clock, limits: Limits) -> None:
        self.fleet = fleet
        self.index = index
        self.probe = probe
        self.clock = clock
        self.limits = limits
        self.calls = Calls(fleet)

    def generate(self, job: Job, trace: Trace) -> AsyncGenerator[int, None]:
        """The answer's tokens, one by one, the stop token included; `trace` is filled in meanwhile.

        Closing the generator cancels the call in flight. Raises `ConfigError` (a worker refuses the request), `DeadlineError` (past the
        job's deadline) or `UnavailableError` (nobody can serve it).
        """
        return _Run(self, job, trace).tokens()

    async def close(self) -> None:
        """End what still runs, then the connections; bounded."""
        await self.calls.close()
        await self.fleet.close()
        await self.probe.close()


class _Run:
    """The state of one job: who failed it, what the pool is known to hold of it."""

    def __init__(self, owner: Dispatcher, job: Job, trace: Trace) -> None:
        self._fleet, self._index, self._probe = owner.fleet, owner.index, owner.probe
        self._clock, self._limits, self._calls = owner.clock, owner.limits, owner.calls
        self._job = job
        self._trace = trace
        self._excluded: set[WorkerRef] = set()
        self._attempts = 0
        self._keys: dict[tuple[bytes, int], list[BlockKey]] = {}
        self._published: tuple[bytes, int] | None = None
        self._planned = Planned(owner.fleet)

    async def tokens(self) -> AsyncGenerator[int, None]:
        """Prefill, then decode until complete."""
        with self._planned:
            async with aclosing(self._prefill()) as first:
                async for token in first:
                    yield token
            async with aclosing(self._decode()) as rest:
                async for token in rest:
                    yield token

    async def _decode(self) -> AsyncGenerator[int, None]:
        """The rest, from one decode worker after the other until it is complete."""
        while self._trace.reason is None:
            self._trace.reason = self._completed()
            if self._trace.reason is not None:
                return
            worker = await self._await_decode_worker()
            try:
                async with aclosing(self._decode_on(worker)) as rest:
                    async for token in rest:
                        yield token
            except KvpoolError as error:
                if self._completed() is None:
                    self._failed(worker, error)

    async def _prefill(self) -> AsyncGenerator[int, None]:
        """The first token from a prefill worker; nothing when none can give it."""
        while not self._trace.generated:
            worker = await self._choose("prefill")
            if worker is None:
                self._trace.fell_back("prefill_failed" if self._trace.retries else "no_prefill_worker")
                return
            try:
                async with aclosing(self._prefill_on(worker)) as first:
                    async for token in first:
                        yield token
            except KvpoolError as error:
                self._failed(worker, error)

    async def _prefill_on(self, worker: Worker) -> AsyncGenerator[int, None]:
        trace, job = self._trace, self._job
        request = PrefillRequest(
            request_id=self._attempt_id("p"), prompt=job.prompt, sampling=job.sampling, scope=job.scope, hand_off=self._plan(worker)
        )
        trace.prefill_worker = worker.ref.id
        keys = self._keys_for(worker)
        missing = len(job.prompt) - self._index.longest(worker.ref, keys) * worker.block_tokens
        events = self._watch(worker).events(worker.port.prefill(request, self._left_s()))
        async with self._calls.open(worker, missing, events) as call:
            event = await anext(events, None)
            if event is None:
                raise UnavailableError(f"{worker.name} ended the prefill without a token")
            if not isinstance(event, FirstToken):
                raise ProtocolError(f"{worker.name} sent {type(event).__name__} before the first token")
            call.place.through()
            trace.sources, trace.times = event.sources, event.times
            self._index.learn(worker.ref, keys)
            yield self._take(event)
            await self._await_published(worker, call)

    async def _await_published(self, worker: Worker, call: Call[PrefillEvent]) -> None:
        """Wait, within limits, for the pool to hold the prompt; without it the decode worker computes what it lacks."""
        began_ns = self._clock.now_ns()
        try:
            async with asyncio.timeout(min(self._limits.publish_timeout_s, self._left_s())):
                event = await anext(call.events, None)
        except TimeoutError:
            self._trace.fell_back("publish_timeout")
        except KvpoolError as error:
            log.warning("%s: %s was lost before it published: %s", self._job.request_id, worker.name, error)
            self._trace.fell_back("publish_lost")
            self._fleet.suspect(worker)
        else:
            call.complete = True
            tokens = event.tokens if isinstance(event, Published) else 0
            self._published = worker.root, tokens
            if tokens < len(self._job.prompt):
                self._trace.fell_back("published_partly")
        self._trace.publish_ns = self._clock.now_ns() - began_ns

    async def _decode_on(self, worker: Worker) -> AsyncGenerator[int, None]:
        trace, job = self._trace, self._job
        request = DecodeRequest(
            request_id=self._attempt_id("d"),
            prompt=job.prompt,
            generated=tuple(trace.generated),
            max_tokens=job.max_tokens,
            stop_tokens=job.stop_tokens,
            sampling=job.sampling,
            scope=job.scope,
        )
        trace.decode_worker = worker.ref.id
        began_ns = self._clock.now_ns()
        backlog = 0 if trace.sources is not None else len(job.prompt)
        events = self._watch(worker).events(worker.port.decode(request, self._left_s()))
        async with self._calls.open(worker, backlog, events) as call:
            async for event in events:
                if isinstance(event, TokenOut):
                    if self._completed() is not None:
                        raise ProtocolError(f"{worker.name} sent a token after the last one")
                    yield self._take(event)
                elif isinstance(event, Started):
                    call.place.through()
                    trace.decode_start_ns = self._clock.now_ns() - began_ns
                    self._started(event)
                elif isinstance(event, Finished):
                    call.complete = True
                    trace.reason = event.reason
                    self._learn_answer(worker)
                    return
        if self._completed() is None:
            raise UnavailableError(f"{worker.name} ended the decode before it was finished")

    def _started(self, event: Started) -> None:
        """A decode worker has the KV: its sources are the request's own when no prefill worker came before it."""
        trace, prompt = self._trace, len(self._job.prompt)
        trace.decode_sources, trace.decode_times = event.sources, event.times
        if trace.sources is None:
            resident = min(event.sources.resident, prompt)
            pool = min(event.sources.pool, prompt - resident)
            trace.sources = TokenSources(resident=resident, pool=pool, computed=prompt - resident - pool)
            trace.times = event.times

    def _take(self, event: FirstToken | TokenOut) -> int:
        if self._job.sampling.logprobs is not None:
            if event.logprobs is None:
                raise ProtocolError("the worker tells no log-probabilities; is it older than this router?")
            self._trace.logprobs.append(event.logprobs)
        self._trace.generated.append(event.token)
        self._trace.first_token_at(self._clock.now_ns())
        return event.token

    def _completed(self) -> FinishReason | None:
        """Why nothing more is to come, if so."""
        generated = self._trace.generated
        if generated and generated[-1] in self._job.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(generated) >= self._job.max_tokens else None

    async def _await_decode_worker(self) -> Worker:
        """The best decode worker, now or as soon as there is one; raises `UnavailableError` at the deadline."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            worker = await self._choose("decode")
            if worker is not None:
                return worker
            self._trace.fell_back("waited_for_decode_worker")
            left_s = self._left_s()
            if self._clock.now_ns() >= self._job.deadline_ns:
                raise UnavailableError("no decode worker became available before the request's deadline")
            if not await self._fleet.wait_for_change(min(left_s, backoff_s)):
                backoff_s = min(_LAST_BACKOFF_S, 2 * backoff_s)
                await self._readmit("decode")

    async def _readmit(self, role: str) -> None:
        """Take back excluded workers that answer again."""
        excluded = [worker for worker in self._fleet.alive(role) if worker.ref in self._excluded]
        loads = await asyncio.gather(*(self._load_of(worker) for worker in excluded))
        self._excluded -= {worker.ref for worker, load in zip(excluded, loads, strict=True) if load is not None}

    def _failed(self, worker: Worker, error: KvpoolError) -> None:
        """Note a failed attempt; raises when it was the last the request may make, or when the request itself is at fault."""
        if isinstance(error, ConfigError):
            raise error
        if self._clock.now_ns() >= self._job.deadline_ns:
            raise DeadlineError(f"the request's deadline passed; last: {error}") from error
        log.warning("%s: %s failed after %d tokens: %s", self._job.request_id, worker.name, len(self._trace.generated), error)
        self._fleet.suspect(worker)
        self._excluded.add(worker.ref)
        self._trace.retries += 1
        if self._trace.retries >= self._limits.max_failures:
            raise UnavailableError(f"given up after {self._trace.retries} failed attempts; last: {error}") from error

    async def _choose(self, role: str) -> Worker | None:
        """The best live worker of `role` that hasn't failed this job; None when there is none."""
        began_ns = self._clock.now_ns()
        workers = self._usable(role)
        worker = self._best(role, workers, await self._pool_tokens(workers))
        if not self._trace.generated:
            self._trace.route_ns += self._clock.now_ns() - began_ns
        return worker

    def _plan(self, prefill: Worker) -> tuple[str, ...]:
        """Settle who is to decode, once the pool holds the prompt as `prefill` will have published it; the nodes to hand its blocks to."""
        if self._job.max_tokens < 2:
            return ()
        began_ns = self._clock.now_ns()
        worker = self._best("decode", self._usable("decode"), {prefill.root: len(self._job.prompt)})
        self._trace.route_ns += self._clock.now_ns() - began_ns
        if worker is None:
            return ()
        self._planned.take(worker, len(self._job.prompt))
        return nodes_beside(self._fleet.view, prefill.host, worker.host)

    def _usable(self, role: str) -> list[Worker]:
        return [worker for worker in self._fleet.alive(role) if worker.ref not in self._excluded]

    def _best(self, role: str, workers: Sequence[Worker], held: Mapping[bytes, int]) -> Worker | None:
        """The best of `workers`, if there is one; `held` are tokens of the prompt in the pool, by namespace root. Ends a plan to decode."""
        planned = self._planned.release() if role == "decode" else None
        candidates = [
            Candidate(
                worker=worker.ref,
                resident_tokens=self._index.longest(worker.ref, self._keys_for(worker)) * worker.block_tokens,
                pool_tokens=held.get(worker.root, 0),
                active=worker.active,
                backlog_tokens=worker.backlog_tokens,
                suspect=self._fleet.suspected(worker),
            )
            for worker in workers
        ]
        choice = choose(candidates, prompt_tokens=len(self._job.prompt), keep=planned.ref if planned is not None else None)
        if choice is None:
            return None
        log.debug("%s: %s for %d tokens: %s", self._job.request_id, role, len(self._job.prompt), choice.explain())
        return next(worker for worker in workers if worker.ref == choice.worker)

    async def _pool_tokens(self, workers: Sequence[Worker]) -> dict[bytes, int]:
        """Tokens of the prompt in the pool, by namespace root. Not asked when the answer could not change the choice."""
        if self._published is not None:
            return dict([self._published])
        if len(workers) < 2:
            return {}
        found: dict[bytes, int] = {}
        for worker in workers:
            if worker.root not in found:
                blocks = await self._probe.longest_prefix(self._keys_for(worker), worker.block_tokens)
                found[worker.root] = (blocks or 0) * worker.block_tokens
        return found

    def _keys_for(self, worker: Worker) -> list[BlockKey]:
        """Keys of the prompt's full blocks in the worker's namespace."""
        space = worker.root, worker.block_tokens
        if space not in self._keys:
            self._keys[space] = chain_keys(worker.root_of(self._job.scope), self._job.prompt, worker.block_tokens)
        return self._keys[space]

    def _learn_answer(self, worker: Worker) -> None:
        """The decode worker holds prompt and answer, but for the last token, whose KV nobody needed."""
        keys = self._keys_for(worker)
        rest = (*self._job.prompt, *self._trace.generated[:-1])[len(keys) * worker.block_tokens :]
        parent = keys[-1] if keys else None
        self._index.learn(worker.ref, [*keys, *chain_keys(worker.root_of(self._job.scope), rest, worker.block_tokens, parent=parent)])

    def _watch(self, worker: Worker) -> Watch:
        return Watch(
            name=worker.name,
            clock=self._clock,
            stall_timeout_s=self._limits.stall_timeout_s,
            deadline_ns=self._job.deadline_ns,
            present=lambda: worker.listed,
            load=lambda: self._load_of(worker),
        )

    async def _load_of(self, worker: Worker) -> int | None:
        """How many requests `worker` says it is busy with; None when it doesn't say."""
        limit_s = min(self._limits.status_timeout_s, self._left_s())
        try:
            with self._fleet.hold(worker):
                async with asyncio.timeout(limit_s):
                    status = await worker.port.status(limit_s)
        except (KvpoolError, TimeoutError):
            return None
        return status.active_requests + status.queued_requests

    def _attempt_id(self, phase: str) -> str:
        """Every attempt has its own id: an old one may still run on a worker that was only stopped."""
        self._attempts += 1
        return f"{self._job.request_id}.{phase}{self._attempts}"

    def _left_s(self) -> float:
        """Seconds to the deadline; never zero, so that a late call fails by its time limit."""
        return max(0.001, (self._job.deadline_ns - self._clock.now_ns()) / SECOND)
