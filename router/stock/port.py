"""A stock engine as a decode worker: `WorkerPort` over its HTTP API.

It decodes whole requests, prompts included, and keeps their KV to itself. It says only at the end, and only if it was told to, how much of
a prompt it had; so `Started` says nothing of that, and `Finished` does. The time to the first token is that of computing when nothing else
was under way; otherwise nobody knows how long the request waited inside.
"""

import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

from kvpool.clock import Clock
from kvpool.errors import ConfigError, ProtocolError, UnavailableError
from kvpool.request import (
    DecodeEvent,
    DecodeRequest,
    Finished,
    PrefillEvent,
    PrefillRequest,
    StageTimes,
    Started,
    TokenOut,
    TokenSources,
    WorkerStatus,
)
from router.stock.http import Exchange, ask, authorization
from router.stock.place import EnginePlace
from router.stock.spelling import Chunk, chunk_of, completion_of, reason_of, tokens_of

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
_NOT_SAID = Started(sources=TokenSources(), times=StageTimes())


class StockPort:
    """A `WorkerPort` to the engine at `place`, which calls its model `model`. Lives on one event loop."""

    def __init__(self, place: EnginePlace, model: str, clock: Clock, context: ssl.SSLContext | None = None) -> None:
        """`context`: for an engine behind HTTPS."""
        self._place = place
        self._model = model
        self._clock = clock
        self._context = context
        self._running = self._begun = 0
        self._open: set[Exchange] = set()

    def prefill(self, request: PrefillRequest, timeout_s: float) -> AsyncIterator[PrefillEvent]:
        """A stock engine is no prefill worker: raises `ConfigError`."""
        raise ConfigError(f"{self._place.address} is a stock engine: it prefills for nobody else")

    async def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        """See `WorkerPort`."""
        self._running += 1
        self._begun += 1
        try:
            async with aclosing(self._decode(request, timeout_s)) as events:
                async for event in events:
                    yield event
        finally:
            self._running -= 1

    async def status(self, timeout_s: float) -> WorkerStatus:
        """What the engine says it is busy with; of one that keeps no statistics, what this router has there."""
        text = (await ask(self._place, "/metrics", timeout_s=timeout_s, context=self._context)).decode(errors="replace")
        found = {"running": 0.0, "waiting": 0.0}
        gauges = _GAUGE.findall(text)
        for name, value in gauges:
            found[name] += float(value)
        return WorkerStatus(
            role="decode",
            model=self._model,
            active_requests=int(found["running"]) if gauges else self._running,
            queued_requests=int(found["waiting"]),
            finished_requests=0,
            failed_requests=0,
            prefill_tokens_per_s=0.0,
            resident_tokens=0,
            reaches={},
        )

    async def close(self) -> None:
        """Cancel what is in flight."""
        for exchange in self._open:
            exchange.close()

    async def _decode(self, request: DecodeRequest, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        alone, begun, sent_ns = self._running == 1, self._begun, self._clock.now_ns()
        body, first_ns, reason, cached = completion_of(request, request.adapter or self._model), 0, None, None
        async with aclosing(self._chunks(body, request.request_id, timeout_s)) as chunks:
            async for chunk in chunks:
                for choice in chunk.choices:
                    tokens = tokens_of(choice, request.sampling.logprobs)
                    if tokens and not first_ns:
                        first_ns = self._clock.now_ns() - sent_ns if alone and begun == self._begun else 1
                        yield _NOT_SAID
                    for token, logprobs in tokens:
                        yield TokenOut(token=token, logprobs=logprobs)
                    reason = reason_of(choice) or reason
                if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
                    cached = chunk.usage.prompt_tokens_details.cached_tokens
        if reason is None:
            raise UnavailableError(f"{self._place.address} ended the answer before it was finished")
        yield Finished(reason=reason, account=_account(request, cached, first_ns))

    async def _chunks(self, body: bytes, request_id: str, timeout_s: float) -> AsyncGenerator[Chunk, None]:
        """The events of the stream. Raises what an error in it stands for."""
        headers = {"x-request-id": request_id, "accept": "text/event-stream", **authorization(self._place)}
        exchange = await Exchange.begin(
            self._place, "/v1/completions", body=body, headers=headers, timeout_s=timeout_s, context=self._context
        )
        self._open.add(exchange)
        try:
            if exchange.status != 200:
                raise await exchange.refused()
            async with aclosing(exchange.lines()) as lines:
                async for line in lines:
                    if not line.startswith(_DATA):
                        continue
                    data = line.removeprefix(_DATA).strip()
                    if data == _DONE:
                        return
                    chunk = chunk_of(data)
                    if chunk.error is not None:
                        raise UnavailableError(f"{self._place.address} gave the answer up: {str(chunk.error)[:200]}")
                    yield chunk
        except ProtocolError as error:
            raise ProtocolError(f"{self._place.address}: {error}") from error
        finally:
            self._open.discard(exchange)
            exchange.close()


def _account(request: DecodeRequest, cached: int | None, first_ns: int) -> Started | None:
    """Where the prompt's KV came from, as the engine says at the end; None from one that doesn't."""
    if cached is None:
        return None
    prompt = len(request.prompt) + len(request.generated)
    resident = min(max(0, cached), prompt)
    times = StageTimes(compute_ns=first_ns if first_ns > 1 else 0)
    return Started(sources=TokenSources(resident=resident, computed=prompt - resident), times=times)
