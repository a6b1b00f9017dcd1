"""The two generation endpoints, from bytes to bytes.

Order matters: a request shows its API key before it takes a slot, takes one before it is read, and is checked in full before any worker
hears of it. In a stream nothing is sent before the first text exists, so that whatever fails until then still gets its proper HTTP status;
only a caller that has waited for long is sent comments meanwhile, which tell it and everything between that the connection lives. After
that an error can only be the stream's last event.
"""

import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Collection
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from kvpool.errors import KvpoolError
from kvpool.security.principal import Principal, Right
from kvpool.units import format_ns
from router.answer import Answer
from router.api.errors import ApiError, internal, of_failure
from router.api.parse import Ask
from router.api.shapes import Shape, encoded
from router.choices import Event, pieces_of
from router.compose import Composer
from router.http import EventStream, HungUpError, bounded, read_body, request_id_of, until_hang_up
from router.job import Trace
from router.metrics import outcome_of
from router.services import Services

log = logging.getLogger("router")


class Parse(Protocol):
    """Reads the body of one endpoint; raises `ApiError`."""

    def __call__(self, body: bytes, *, model: str, seed: int, adapters: Collection[str]) -> Ask:
        """What is asked; `model` is the served one, with its `adapters`; `seed` the one to use when the caller gives none."""
        ...


@dataclass(slots=True, kw_only=True)
class _Call:
    """One request under way; it has answers once it was read and checked."""

    request: Request
    send: Send
    request_id: str
    answer_id: str
    arrived_ns: int
    answers: list[Answer] = field(default_factory=list)

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
        self._composer = Composer(services)
        self._name = name
        self._parse = parse

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one request; however it ends, it is counted and logged once."""
        services = self._services
        request = Request(scope, receive)
        call = _Call(
            request=request,
            send=bounded(send, services.limits.client_timeout_s),
            request_id=request_id_of(request),
            answer_id=("chatcmpl-" if self._name == "chat" else "cmpl-") + uuid.uuid4().hex,
            arrived_ns=services.clock.now_ns(),
        )
        outcome = "hung_up"
        try:
            outcome = await self._answer(call)
        except HungUpError:
            log.debug("%s: the caller hung up", call.request_id)
        finally:
            self._stop_clock(call)
            services.metrics.ended(self._name, outcome)
            for answer in call.answers:
                services.metrics.generated(len(answer.job.prompt), answer.trace)
                services.decisions.ended(answer.job.request_id, answer.trace)
                services.recorder.ended(answer.job, answer.trace, outcome)
            _log_end(call, outcome)

    async def _answer(self, call: _Call) -> str:
        """Answer, or say what is wrong; the outcome."""
        services = self._services
        try:
            principal = services.access.check(call.request, Right.READ, Right.WRITE)
            with ExitStack() as slots:
                slots.enter_context(services.slot())
                body = await read_body(call.request, services.limits.max_body_bytes, services.limits.client_timeout_s)
                ask = self._parse(body, model=services.model.name, seed=secrets.randbits(63), adapters=services.adapters())
                for _ in range(ask.n * max(1, len(ask.prompts)) - 1):
                    slots.enter_context(services.slot())
                return await until_hang_up(call.request, self._generate(call, ask, principal))
        except HungUpError:
            raise
        except Exception as error:
            return await call.refuse(_spoken(error, call))

    async def _generate(self, call: _Call, ask: Ask, principal: Principal) -> str:
        services = self._services
        call.answers = await self._composer.answers(
            ask, principal, headers=call.request.headers, answer_id=call.answer_id, arrived_ns=call.arrived_ns
        )
        for answer in call.answers:
            services.decisions.began(
                answer.job.request_id,
                answer_id=call.answer_id,
                request_id=call.request_id,
                tenant=principal.tenant,
                trace=answer.trace,
            )
        shape = Shape(
            chat=ask.chat,
            id=call.answer_id,
            model=ask.adapter or services.model.name,
            created=int(time.time()),
            usage=ask.stream and ask.include_usage,
        )
        generations = [answer.generation for answer in call.answers]
        leaders = [answer.leader for answer in call.answers]
        async with aclosing(pieces_of(generations, leaders, services.dispatcher)) as pieces:
            if ask.stream:
                return await self._stream(call, ask, shape, pieces)
            async for index, piece in pieces:
                if piece is not None:
                    call.answers[index].take(piece)
        self._stop_clock(call)
        said = [answer.said() for answer in call.answers]
        await call.respond(JSONResponse(shape.whole(said, self._composer.usage(call.answers), self._composer.extension(call.answers, ask))))
        return "ok"

    async def _stream(self, call: _Call, ask: Ask, shape: Shape, pieces: AsyncGenerator[Event, None]) -> str:
        """Each choice opens with the role (chat) and ends with its reason; the last chunk carries usage (if asked for) and `kvpool`."""
        events = EventStream(call.send, {"x-request-id": call.request_id})
        async with events.kept_alive(self._services.limits.keepalive_s):
            try:
                event = await anext(pieces)
            except Exception as error:
                if not events.started:
                    raise
                return await _broken(events, error, call)
        await events.start()
        left = len(call.answers)
        try:
            while True:
                index, piece = event
                answer = call.answers[index]
                if not answer.opened:
                    answer.opened = True
                    if ask.chat:
                        await events.write(encoded(shape.chunk("", index=index, first=True)))
                    elif answer.echo:
                        await events.write(shape.text_event(answer.echo, index))
                if piece is None:
                    left -= 1
                    if not left:
                        break
                    await events.write(encoded(shape.chunk(None, index=index, finish_reason=answer.generation.finish_reason)))
                elif piece.likely or piece.calls:
                    calls = answer.number(piece.calls)
                    text = piece.text if piece.text or not calls else None
                    await events.write(encoded(shape.chunk(text, index=index, logprobs=answer.logprobs(piece.likely), calls=calls)))
                else:
                    await events.write(shape.text_event(piece.text, index))
                event = await anext(pieces)
        except HungUpError:
            raise
        except Exception as error:
            return await _broken(events, error, call)
        self._stop_clock(call)
        last = shape.chunk(None, index=index, finish_reason=answer.generation.finish_reason)
        if ask.include_usage:
            await events.write(encoded(last))
            last = shape.usage_chunk(self._composer.usage(call.answers))
        await events.write(encoded({**last, "kvpool": self._composer.extension(call.answers, ask)}))
        await events.done()
        return "ok"

    def _stop_clock(self, call: _Call) -> None:
        for answer in call.answers:
            answer.trace.total_ns = self._services.clock.now_ns() - call.arrived_ns


async def _broken(events: EventStream, error: Exception, call: _Call) -> str:
    """End a stream that has begun with an error; the outcome."""
    if isinstance(error, HungUpError):
        raise error
    failure = _spoken(error, call)
    await events.fail(failure.body())
    return outcome_of(failure.status)


def _spoken(error: Exception, call: _Call) -> ApiError:
    """`error` as the caller hears it; a fault of the router is logged in full and told in general."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, KvpoolError):
        log.error("%s failed on a fault of the router", call.request_id, exc_info=error)
        return internal()
    return of_failure(error)


def _log_end(call: _Call, outcome: str) -> None:
    if not call.answers:
        log.info("%s %s %s", call.request_id, call.answer_id, outcome)
    for answer in call.answers:
        trace: Trace = answer.trace
        log.info(
            "%s %s %s: %d prompt tokens (%d cached), %d generated, first after %s, %s in all, prefill %s, decode %s, %d retries%s",
            call.request_id,
            answer.job.request_id,
            outcome,
            len(answer.job.prompt),
            trace.cached_tokens,
            len(trace.generated),
            format_ns(trace.first_token_ns),
            format_ns(trace.total_ns),
            (trace.prefill_worker or "-")[:8],
            (trace.decode_worker or "-")[:8],
            trace.retries,
            "".join(f", {reason}" for reason in trace.fallbacks),
        )
