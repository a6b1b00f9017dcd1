"""The two generation endpoints, from bytes to bytes.

Order matters: a request shows its API key before it takes a slot, takes one before it is read, and is checked in full before any worker
hears of it. In a stream nothing is sent before the first text exists, so that whatever fails until then still gets its proper HTTP status;
after that an error can only be the stream's last event.
"""

import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from kvpool.errors import KvpoolError
from kvpool.request import EVERYBODY, Scope
from kvpool.security.principal import Right
from kvpool.units import SECOND, format_ns
from router.api.errors import ApiError, bad_request, context_length_exceeded, internal, of_failure
from router.api.parse import Ask
from router.api.shapes import Shape, extension_of, usage_of
from router.generation import Generation
from router.http import EventStream, HungUpError, bounded, read_body, request_id_of, until_hang_up
from router.job import Job, Trace
from router.metrics import outcome_of
from router.services import Services
from router.text.stops import StopScanner

log = logging.getLogger("router")


class Parse(Protocol):
    """Reads the body of one endpoint; raises `ApiError`."""

    def __call__(self, body: bytes, *, model: str, seed: int) -> Ask:
        """What is asked; `model` is the served one, `seed` the one to use when the caller gives none."""
        ...


@dataclass(slots=True, kw_only=True)
class _Call:
    """One request under way."""

    request: Request
    send: Send
    request_id: str
    answer_id: str
    trace: Trace
    prompt_tokens: int = 0
    scope: Scope = EVERYBODY

    async def respond(self, response: JSONResponse) -> None:
        """Send a whole response."""
        response.headers["x-request-id"] = self.request_id
        await response(self.request.scope, self.request.receive, self.send)

    async def refuse(self, error: ApiError) -> str:
        """Send an error answer; its outcome."""
        await self.respond(JSONResponse(error.body(), status_code=error.status, headers=error.headers))
        return outcome_of(error.status)


class GenerateEndpoint:
    """An ASGI application: one of /v1/chat/completions and /v1/completions."""

    def __init__(self, services: Services, *, name: str, parse: Parse) -> None:
        """`name` labels metrics."""
        self._services = services
        self._name = name
        self._parse = parse

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one request; however it ends, it is counted and logged once."""
        services = self._services
        request = Request(scope, receive)
        trace = Trace(arrived_ns=services.clock.now_ns())
        answer_id = ("chatcmpl-" if self._name == "chat" else "cmpl-") + uuid.uuid4().hex
        patient = bounded(send, services.limits.client_timeout_s)
        call = _Call(request=request, send=patient, request_id=request_id_of(request), answer_id=answer_id, trace=trace)
        outcome = "hung_up"
        try:
            outcome = await self._answer(call)
        except HungUpError:
            log.debug("%s: the caller hung up", call.request_id)
        finally:
            trace.total_ns = services.clock.now_ns() - trace.arrived_ns
            services.metrics.ended(self._name, outcome)
            if call.prompt_tokens:
                services.metrics.generated(call.prompt_tokens, trace)
            _log_end(call, outcome)

    async def _answer(self, call: _Call) -> str:
        """Answer, or say what is wrong; the outcome."""
        services = self._services
        try:
            principal = services.access.check(call.request, Right.READ, Right.WRITE)
            with services.slot():
                body = await read_body(call.request, services.limits.max_body_bytes, services.limits.client_timeout_s)
                ask = self._parse(body, model=services.model.name, seed=secrets.randbits(63))
                call.scope = services.access.scope(principal, ask.cache_salt)
                return await until_hang_up(call.request, self._generate(call, ask))
        except HungUpError:
            raise
        except Exception as error:
            return await call.refuse(_spoken(error, call))

    async def _generate(self, call: _Call, ask: Ask) -> str:
        services = self._services
        job = await self._job(call, ask)
        call.prompt_tokens = len(job.prompt)
        generation = Generation(
            job=job,
            trace=call.trace,
            detokenizer=services.model.detokenizer(() if ask.chat else job.prompt),
            stops=StopScanner(ask.stops),
            clock=services.clock,
            on_gap=services.metrics.gap,
        )
        shape = Shape(chat=ask.chat, id=call.answer_id, model=services.model.name, created=int(time.time()))
        async with aclosing(generation.pieces(services.dispatcher)) as pieces:
            if ask.stream:
                return await self._stream(call, ask, shape, generation, pieces)
            text = "".join([piece async for piece in pieces])
        self._stop_clock(call)
        usage = usage_of(call.prompt_tokens, call.trace)
        extension = extension_of(call.trace, token_ids=ask.return_token_ids)
        await call.respond(JSONResponse(shape.whole(text, generation.finish_reason, usage, extension)))
        return "ok"

    async def _job(self, call: _Call, ask: Ask) -> Job:
        """Tokenise, and check against vocabulary and context."""
        services = self._services
        began_ns = services.clock.now_ns()
        prompt = ask.tokens if ask.tokens is not None else await services.tokens_of(ask.text, ask.messages)
        call.trace.tokenize_ns = services.clock.now_ns() - began_ns
        if not prompt:
            raise bad_request(f"{ask.prompt_param} has no tokens.", param=ask.prompt_param)
        if max(prompt) >= services.model.vocabulary:
            raise bad_request(f"prompt holds token id {max(prompt)}; ids end at {services.model.vocabulary - 1}.", param="prompt")
        context = services.context_tokens()
        room = context - len(prompt)
        if room < 1 or (ask.max_tokens is not None and ask.max_tokens > room):
            raise context_length_exceeded(context, len(prompt), ask.max_tokens or 1, param=ask.prompt_param)
        return Job(
            request_id=call.answer_id,
            prompt=prompt,
            max_tokens=ask.max_tokens if ask.max_tokens is not None else room,
            stop_tokens=() if ask.ignore_eos else services.model.stop_tokens,
            sampling=ask.sampling,
            deadline_ns=call.trace.arrived_ns + int(services.limits.request_timeout_s * SECOND),
            scope=call.scope,
        )

    async def _stream(self, call: _Call, ask: Ask, shape: Shape, generation: Generation, pieces: AsyncGenerator[str, None]) -> str:
        """The first chunk names the role, the last carries usage (if asked for) and `kvpool`; the outcome."""
        without_usage = {"usage": None} if ask.include_usage else {}
        text = await anext(pieces, None)
        events = EventStream(call.send, {"x-request-id": call.request_id})
        await events.start()
        try:
            if ask.chat:
                await events.event({**shape.chunk("", first=True), **without_usage})
            while text is not None:
                await events.event({**shape.chunk(text), **without_usage})
                text = await anext(pieces, None)
        except HungUpError:
            raise
        except Exception as error:
            failure = _spoken(error, call)
            await events.fail(failure.body())
            return outcome_of(failure.status)
        self._stop_clock(call)
        last = shape.chunk(None, finish_reason=generation.finish_reason)
        if ask.include_usage:
            await events.event({**last, **without_usage})
            last = {**shape.usage_chunk(), "usage": usage_of(call.prompt_tokens, call.trace)}
        await events.event({**last, "kvpool": extension_of(call.trace, token_ids=ask.return_token_ids)})
        await events.done()
        return "ok"

    def _stop_clock(self, call: _Call) -> None:
        call.trace.total_ns = self._services.clock.now_ns() - call.trace.arrived_ns


def _spoken(error: Exception, call: _Call) -> ApiError:
    """`error` as the caller hears it; a fault of the router is logged in full and told in general."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, KvpoolError):
        log.error("%s failed on a fault of the router", call.request_id, exc_info=error)
        return internal()
    return of_failure(error)


def _log_end(call: _Call, outcome: str) -> None:
    trace = call.trace
    log.info(
        "%s %s %s: %d prompt tokens (%d cached), %d generated, first after %s, %s in all, prefill %s, decode %s, %d retries%s",
        call.request_id,
        call.answer_id,
        outcome,
        call.prompt_tokens,
        trace.cached_tokens,
        len(trace.generated),
        format_ns(trace.first_token_ns),
        format_ns(trace.total_ns),
        (trace.prefill_worker or "-")[:8],
        (trace.decode_worker or "-")[:8],
        trace.retries,
        "".join(f", {reason}" for reason in trace.fallbacks),
    )
