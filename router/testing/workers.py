"""Workers that follow a script: a real worker's behaviour, and its failures, without a model.

As with a real worker the token at a position depends on the prompt and the position only, whoever computes it.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from kvpool.errors import ConfigError, UnavailableError
from kvpool.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    Logprobs,
    PrefillEvent,
    PrefillRequest,
    Published,
    Sampling,
    StageTimes,
    Started,
    TokenOut,
    TokenSources,
    WorkerStatus,
)

Answer = Callable[[tuple[int, ...], int], int]
"""(prompt, position in the answer) -> token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong in one call, before event number `after` (from 0): `die`, `hang`, `end` (no error) or `refuse`."""

    kind: str
    after: int = 0


class ScriptedWorker:
    """A `WorkerPort` that needs no worker."""

    def __init__(self, answer: Answer, *, cached: int = 0, delay_s: float = 0.0) -> None:
        """`cached` prompt tokens are said to come from the pool; every event takes `delay_s`."""
        self.answer = answer
        self.cached = cached
        self.delay_s = delay_s
        self.faults: deque[Fault] = deque()
        """One for each coming call, in order; calls beyond them go well."""
        self.answers_status = True
        self.calls: list[PrefillRequest | DecodeRequest] = []
        self.running = 0
        self.cancelled = 0
        """Calls the caller gave up."""
        self.closed = False

    async def prefill(self, request: PrefillRequest, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        """See `WorkerPort`."""
        sources = self._sources(len(request.prompt))
        token = self.answer(request.prompt, 0)
        times = StageTimes(compute_ns=1_000_000)
        first = FirstToken(token=token, sources=sources, times=times, logprobs=likely(token, request.sampling))
        run = self._run(request, [first, Published(tokens=len(request.prompt), blocks_written=1)])
        async with aclosing(run) as events:
            async for event in events:
                yield event

    async def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        """See `WorkerPort`."""
        events: list[DecodeEvent] = [Started(sources=self._sources(len(request.prompt)), times=StageTimes(load_ns=1_000_000))]
        reason = FinishReason.LENGTH
        for position in range(len(request.generated), request.max_tokens):
            token = self.answer(request.prompt, position)
            events.append(TokenOut(token=token, logprobs=likely(token, request.sampling)))
            if token in request.stop_tokens:
                reason = FinishReason.STOP
                break
        async with aclosing(self._run(request, [*events, Finished(reason=reason)])) as run:
            async for event in run:
                yield event

    async def status(self, timeout_s: float) -> WorkerStatus:
        """See `WorkerPort`; never answers while `answers_status` is false."""
        if not self.answers_status:
            await asyncio.Event().wait()
        return status_of(self.running)

    async def close(self) -> None:
        """See `WorkerPort`."""
        self.closed = True

    def _sources(self, prompt: int) -> TokenSources:
        cached = min(self.cached, prompt)
        return TokenSources(pool=cached, computed=prompt - cached)

    async def _run(self, request: PrefillRequest | DecodeRequest, events: Sequence[Any]) -> AsyncGenerator[Any, None]:
        self.calls.append(request)
        fault = self.faults.popleft() if self.faults else None
        self.running += 1
        try:
            for number, event in enumerate(events):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if fault is not None and number == fault.after:
                    if fault.kind == "end":
                        return
                    await _fail(fault)
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def status_of(running: int, *, prefill_tokens_per_s: float = 0.0) -> WorkerStatus:
    """What a stand-in for a worker says of itself while it serves `running` requests."""
    return WorkerStatus(
        role="decode",
        model="m",
        active_requests=running,
        queued_requests=0,
        finished_requests=0,
        failed_requests=0,
        prefill_tokens_per_s=prefill_tokens_per_s,
        resident_tokens=0,
        reaches={},
    )


def likely(token: int, sampling: Sampling) -> Logprobs | None:
    """Log-probabilities as a scripted worker tells them: -0.5 for the token, the tokens behind it half a step less each."""
    if sampling.logprobs is None:
        return None
    return Logprobs(chosen=-0.5, top=tuple((token + step, -0.5 - step / 2) for step in range(sampling.logprobs)))


async def _fail(fault: Fault) -> None:
    if fault.kind == "hang":
        await asyncio.Event().wait()
    if fault.kind == "refuse":
        raise ConfigError("the worker does not like this request")
    raise UnavailableError("the worker died")
