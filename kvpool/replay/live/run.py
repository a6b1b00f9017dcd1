"""Requests sent at their times, each in a task of its own: an open loop, so that a slow router meets the load that it would meet."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.errors import ConfigError
from kvpool.replay.live.caller import Caller, Result
from kvpool.replay.traces import Prompts, Trace, TraceRequest

ASK_TIMEOUT_S = 30.0
MAX_OPEN = 1024
_WORDS = (
    "the quick brown fox jumps over a lazy dog and then some more words of every day like time year people way man thing life hand part"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`speed` divides the trace's times; `size`: tokens that a block of the trace becomes (None: as many as there)."""

    speed: float = 1.0
    size: int | None = None
    max_open: int = MAX_OPEN
    timeout_s: float = 300.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"the speed must be above 0, got {self.speed}")
        if (self.size is not None and self.size < 1) or self.max_open < 1:
            raise ConfigError("blocks and open requests must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a replay came to: results in the trace's order of those that were `sent`, and how many didn't fit the model's context."""

    sent: tuple[TraceRequest, ...]
    results: tuple[Result, ...]
    too_long: int
    size: int
    """Tokens of a block, as it was sent."""
    took_s: float


async def run(caller: Caller, trace: Trace, plan: Plan, model: str | None = None) -> Sent:
    """Replay `trace` on the router of `caller`. Raises `UnavailableError`, `ConfigError` when nothing of it can be sent."""
    served = (await caller.get("/v1/models", ASK_TIMEOUT_S))["data"][0]
    model, context = model or served["id"], int(served.get("max_model_len") or 1 << 30)
    alphabet = (await caller.post("/tokenize", {"text": _WORDS}, ASK_TIMEOUT_S))["tokens"]
    prompts = Prompts(alphabet, block_tokens=trace.block_tokens, size=plan.size, seed=plan.seed)
    jobs: list[tuple[int, TraceRequest]] = []
    for index, request in enumerate(trace.requests):
        if max(1, round(request.prompt_tokens * prompts.scale)) + prompts.output_tokens(request) <= context:
            jobs.append((index, request))
    if not jobs:
        raise ConfigError(f"no request of {trace.name} fits the model's context of {context} tokens; make blocks smaller (--block-tokens)")
    began = time.monotonic()
    gate = asyncio.Semaphore(plan.max_open)
    tasks: list[asyncio.Task[Result]] = []
    try:
        for index, request in jobs:
            due = began + (request.at_ns - jobs[0][1].at_ns) / 1e9 / plan.speed
            prompt = prompts.prompt(index, request)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            await gate.acquire()
            tasks.append(asyncio.ensure_future(_one(caller, model, prompt, prompts.output_tokens(request), request, due, gate, plan)))
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return Sent(
        sent=tuple(request for _, request in jobs),
        results=tuple(results),
        too_long=len(trace.requests) - len(jobs),
        size=plan.size or trace.block_tokens,
        took_s=time.monotonic() - began,
    )


async def _one(
    caller: Caller,
    model: str,
    prompt: Sequence[int],
    output: int,
    request: TraceRequest,
    due: float,
    gate: asyncio.Semaphore,
    plan: Plan,
) -> Result:
    try:
        late_s = max(0.0, time.monotonic() - due)
        return await caller.complete(model, prompt, output, session=request.session, timeout_s=plan.timeout_s, late_s=late_s)
    finally:
        gate.release()
