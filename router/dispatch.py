"""One request's way through the cluster, whatever happens to the workers meanwhile.

::

    queue ── prefill ── FirstToken ──▶ (token) ── Published ──▶ decode ── Started, TokenOut... ──▶ (tokens) ── Finished
      │         │ none alive, or all failed                        ▲   │ failed after k tokens
      └─────────┴──────────────────────────────────────────────────┘   └──▶ another decode worker, with prompt + tokens so far

Before any worker hears of it a request is looked up in the pool, may be refused, follows who computes the same prefix already, and waits
for room (`router/queue`). What is short, or held already but for a little, goes to a decode worker at once. Who is to decode is planned
when the prefill is sent, so that the prefill worker's blocks can be pushed there (`handoff.py`).

Sampling depends on (seed, position) only, so whoever continues continues with the same tokens, and a token once yielded
is never asked for again. A worker that failed is excluded from this request, as this incarnation, and the request stands in line again, in
front, with the priority and the deadline it had: those that are left may be full. When nobody is left it waits for the cluster to change,
and every few seconds asks the excluded whether they answer again (they may only have been stopped, or the network cut). It ends with its
last token, with its deadline, or after `max_failures` failed attempts.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvpool.clock import Clock
from kvpool.engine.attention.settings import FULL
from kvpool.errors import KvpoolError, ProtocolError, UnavailableError
from kvpool.policy.admission.fairness import ANSWER
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
from router.attempts import Attempts
from router.attention import suits
from router.calls import Call, Calls
from router.choose import Chooser, Chosen
from router.fleet import Fleet
from router.handoff import Planned, nodes_beside
from router.holdings import Holdings
from router.job import Job, Trace
from router.need import Need
from router.queue.entrance import Entrance, Entry
from router.settings import Limits
from router.worker import Worker

log = logging.getLogger("router.dispatch")

_FIRST_BACKOFF_S = 0.5
_LAST_BACKOFF_S = 5.0


class Dispatcher:
    """Runs jobs on the fleet."""

    def __init__(self, *, fleet: Fleet, holdings: Holdings, chooser: Chooser, entrance: Entrance, clock: Clock, limits: Limits) -> None:
        self.fleet = fleet
        self.holdings = holdings
        self.chooser = chooser
        self.entrance = entrance
        self.clock = clock
        self.limits = limits
        self.calls = Calls(fleet)

    def generate(self, job: Job, trace: Trace) -> AsyncGenerator[int, None]:
        """The answer's tokens, one by one, the stop token included; `trace` is filled in meanwhile.

        Closing the generator cancels the call in flight. Raises `RefusedError` (not now), `ConfigError` (a worker refuses the request),
        `DeadlineError` (past the job's deadline) or `UnavailableError` (nobody can serve it).
        """
        return _Run(self, job, trace).tokens()

    def start(self) -> None:
        """Follow the cluster from now on; call on the event loop."""
        self.fleet.start()
        self.holdings.start()

    async def close(self) -> None:
        """End what still runs, then the connections; bounded."""
        await self.entrance.close()
        await self.calls.close()
        await self.fleet.close()
        await self.holdings.close()


class _Run:
    """The state of one job."""

    def __init__(self, owner: Dispatcher, job: Job, trace: Trace) -> None:
        self._fleet, self._holdings, self._chooser = owner.fleet, owner.holdings, owner.chooser
        self._clock, self._limits, self._calls = owner.clock, owner.limits, owner.calls
        self._job = job
        self._trace = trace
        self._need = Need(job)
        self._attempts = Attempts(owner.fleet, owner.clock, owner.limits, job, trace)
        self._planned = Planned(owner.fleet)
        self._entry: Entry = owner.entrance.entry(self._need, trace, self._attempts)
        self._last_ns = self._resumed_ns = 0

    async def tokens(self) -> AsyncGenerator[int, None]:
        """Wait for a place, prefill, then decode until complete."""
        with self._planned, self._entry:
            await self._entry.enter()
            if not self._entry.direct:
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
            await self._entry.again()
            chosen = await self._await_decode_worker()
            try:
                async with aclosing(self._decode_on(chosen)) as rest:
                    async for token in rest:
                        yield token
            except KvpoolError as error:
                if self._completed() is None:
                    self._attempts.failed(chosen.worker, error)
            finally:
                self._chooser.ended(chosen)

    async def _prefill(self) -> AsyncGenerator[int, None]:
        """The first token from a prefill worker; nothing when none can give it."""
        while not self._trace.generated:
            await self._entry.again()
            chosen = self._choose("prefill", "p")
            if chosen is None:
                self._trace.fell_back("prefill_failed" if self._trace.retries else "no_prefill_worker")
                return
            try:
                async with aclosing(self._prefill_on(chosen)) as first:
                    async for token in first:
                        yield token
            except KvpoolError as error:
                self._planned.release()  # in line it takes up no room
                self._attempts.failed(chosen.worker, error)
            finally:
                self._chooser.ended(chosen)

    async def _prefill_on(self, chosen: Chosen) -> AsyncGenerator[int, None]:
        trace, job, worker = self._trace, self._job, chosen.worker
        hand_off = self._plan(worker)
        request = PrefillRequest(
            request_id=chosen.ask.request_id, prompt=job.prompt, sampling=job.sampling, scope=job.scope, hand_off=hand_off
        )
        trace.prefill_worker = worker.ref.id
        missing = len(job.prompt) - chosen.scored.candidate.resident_tokens
        events = self._attempts.watch(worker).events(worker.port.prefill(request, self._attempts.left_s()))
        async with self._calls.open(worker, missing, events) as call:
            self._sent(chosen)
            event = await anext(events, None)
            if event is None:
                raise UnavailableError(f"{worker.name} ended the prefill without a token")
            if not isinstance(event, FirstToken):
                raise ProtocolError(f"{worker.name} sent {type(event).__name__} before the first token")
            call.place.through()
            trace.sources, trace.times = event.sources, event.times
            self._answered(chosen, event)
            self._holdings.learn(worker, self._need)
            yield self._take(event)
            await self._await_published(worker, call)

    def _sent(self, chosen: Chosen) -> None:
        self._chooser.routed(chosen)
        self._entry.arrived(chosen.worker, self._chooser.expected_s(chosen))

    def _answered(self, chosen: Chosen, event: FirstToken | Started) -> None:
        self._chooser.answered(chosen, event.sources, event.times)
        self._entry.loaded()

    async def _await_published(self, worker: Worker, call: Call[PrefillEvent]) -> None:
        """Wait, within limits, for the pool to hold the prompt; without it the decode worker computes what it lacks."""
        began_ns = self._clock.now_ns()
        try:
            async with asyncio.timeout(min(self._limits.publish_timeout_s, self._attempts.left_s())):
                event = await anext(call.events, None)
        except TimeoutError:
            self._trace.fell_back("publish_timeout")
        except KvpoolError as error:
            log.warning("%s: %s was lost before it published: %s", self._job.request_id, worker.name, error)
            self._trace.fell_back("publish_lost")
            self._fleet.suspect(worker)
        else:
            call.complete = True
            tokens = min(event.tokens, len(self._job.prompt)) if isinstance(event, Published) else 0
            self._entry.landed(worker, tokens // worker.block_tokens)
            if tokens < len(self._job.prompt):
                self._trace.fell_back("published_partly")
        self._trace.publish_ns = self._clock.now_ns() - began_ns

    async def _decode_on(self, chosen: Chosen) -> AsyncGenerator[int, None]:
        trace, job, worker = self._trace, self._job, chosen.worker
        trace.attention = trace.attention or job.attention or worker.said.attention
        request = DecodeRequest(
            request_id=chosen.ask.request_id,
            prompt=job.prompt,
            generated=tuple(trace.generated),
            max_tokens=job.max_tokens,
            stop_tokens=job.stop_tokens,
            sampling=job.sampling,
            scope=job.scope,
            attention=trace.attention,
            adapter=job.adapter,
        )
        trace.decode_worker = worker.ref.id
        began_ns = self._clock.now_ns()
        backlog = 0 if trace.sources is not None else max(0, len(job.prompt) - chosen.scored.candidate.held_tokens)
        in_use = len(job.prompt) + len(trace.generated)
        events = self._attempts.watch(worker).events(worker.port.decode(request, self._attempts.left_s()))
        async with self._calls.open(worker, backlog, events, decode_tokens=in_use) as call:
            self._sent(chosen)
            async for event in events:
                if isinstance(event, TokenOut):
                    if self._completed() is not None:
                        raise ProtocolError(f"{worker.name} sent a token after the last one")
                    call.place.grew()
                    yield self._take(event, worker)
                    self._resumed_ns = self._clock.now_ns()
                elif isinstance(event, Started):
                    call.place.through()
                    trace.decode_start_ns = self._clock.now_ns() - began_ns
                    self._started(chosen, event)
                elif isinstance(event, Finished):
                    call.complete = True
                    trace.reason = event.reason
                    if event.account is not None:
                        self._account(chosen, event.account)
                    self._holdings.learn(worker, self._need, trace.generated if trace.attention in ("", FULL) else None)
                    return
        if self._completed() is None:
            raise UnavailableError(f"{worker.name} ended the decode before it was finished")

    def _started(self, chosen: Chosen, event: Started) -> None:
        """A decode worker has the KV: its sources are the request's own when no prefill worker came before it."""
        trace, prompt = self._trace, len(self._job.prompt)
        self._last_ns = 0
        self._answered(chosen, event)
        self._entry.decoding(chosen.worker)
        trace.decode_sources, trace.decode_times = event.sources, event.times
        if trace.sources is None:
            resident = min(event.sources.resident, prompt)
            pool = min(event.sources.pool, prompt - resident)
            trace.sources = TokenSources(resident=resident, pool=pool, computed=prompt - resident - pool)
            trace.times = event.times

    def _account(self, chosen: Chosen, event: Started) -> None:
        """A worker that counts only at the end says where the KV came from."""
        trace = self._trace
        self._chooser.answered(chosen, event.sources, event.times)
        trace.decode_sources, trace.decode_times = event.sources, event.times
        if trace.prefill_worker is None and not trace.retries:
            trace.sources, trace.times = event.sources, event.times

    def _take(self, event: FirstToken | TokenOut, worker: Worker | None = None) -> int:
        if self._job.sampling.logprobs is not None:
            if event.logprobs is None:
                raise ProtocolError("the worker tells no log-probabilities; is it older than this router?")
            self._trace.logprobs.append(event.logprobs)
        now_ns = self._clock.now_ns()
        if worker is not None and self._last_ns > 0 and 4 * (self._resumed_ns - self._last_ns) < now_ns - self._last_ns:
            self._chooser.stepped(worker, now_ns - self._last_ns)  # the worker was waited for, not the caller
        self._last_ns = now_ns
        self._trace.generated.append(event.token)
        self._trace.first_token_at(now_ns)
        self._entry.spent(ANSWER)
        return event.token

    def _completed(self) -> FinishReason | None:
        """Why nothing more is to come, if so."""
        generated = self._trace.generated
        if generated and generated[-1] in self._job.stop_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(generated) >= self._job.max_tokens else None

    async def _await_decode_worker(self) -> Chosen:
        """The best decode worker, now or as soon as there is one; raises `UnavailableError` at the deadline."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            chosen = self._choose("decode", "d")
            if chosen is not None:
                return chosen
            self._trace.fell_back("waited_for_decode_worker")
            self._entry.stepped_aside()
            left_s = self._attempts.left_s()
            if self._attempts.over:
                raise UnavailableError("no decode worker became available before the request's deadline")
            if not await self._fleet.wait_for_change(min(left_s, backoff_s)):
                backoff_s = min(_LAST_BACKOFF_S, 2 * backoff_s)
                await self._attempts.readmit("decode")

    def _choose(self, role: str, phase: str) -> Chosen | None:
        """The best live worker of `role` that hasn't failed this job; None when there is none."""
        began_ns = self._clock.now_ns()
        planned = self._planned.release() if role == "decode" else None
        keep = planned.ref if planned is not None else None
        workers = self._decoders() if role == "decode" else self._attempts.usable(role)
        chosen = self._chooser.best(role, self._need, workers, self._attempts.new_id(phase), keep)
        if not self._trace.generated:
            self._trace.route_ns += self._clock.now_ns() - began_ns
        return chosen

    def _decoders(self) -> list[Worker]:
        """Decode workers that take requests, haven't failed this one, and read as it is to be read."""
        text = self._trace.attention or self._job.attention
        return [worker for worker in self._attempts.usable("decode") if suits(text, worker)]

    def _plan(self, prefill: Worker) -> tuple[str, ...]:
        """Settle who is to decode, once the pool holds the prompt as `prefill` will have published it; the nodes to hand its blocks to."""
        if self._job.max_tokens < 2:
            return ()
        began_ns = self._clock.now_ns()
        self._planned.release()
        chosen = self._chooser.best("decode", self._need.supposing(prefill), self._decoders(), f"{self._job.request_id}.plan")
        self._trace.route_ns += self._clock.now_ns() - began_ns
        if chosen is None:
            return ()
        self._planned.take(chosen.worker, len(self._job.prompt))
        return nodes_beside(self._fleet.view, prefill.host, chosen.worker.host)
