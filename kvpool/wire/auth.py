"""Who may call what: one table of methods and rights, and the interceptor in front of every server that keeps to it.

A method that is not in the table is refused: a new call must say here who may make it. Where no tokens are given (one machine) everybody
is `ANYBODY` and only the audit log is kept. Handlers learn who called by `caller()`.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc
import grpc.aio

from kvpool.clock import Clock
from kvpool.errors import AccessError
from kvpool.policy.rates import Bucket, Rates
from kvpool.security.audit import AuditLog
from kvpool.security.principal import ANYBODY, Principal, Right
from kvpool.security.tokens import TokenTable
from kvpool.units import MS
from kvpool.wire.credentials import TOKEN_HEADER

log = logging.getLogger(__name__)

_R, _W, _MAP, _WORKER, _ADMIN = Right.READ, Right.WRITE, Right.MAP, Right.WORKER, Right.ADMIN

METHODS: Mapping[str, tuple[Right, ...]] = {
    "/kvpool.v1.Pool/Describe": (_R, _W, _WORKER, _ADMIN),
    "/kvpool.v1.Pool/Lookup": (_R, _WORKER, _ADMIN),
    "/kvpool.v1.Pool/Reserve": (_W, _WORKER),
    "/kvpool.v1.Pool/Commit": (_W, _WORKER),
    "/kvpool.v1.Pool/Acquire": (_R, _WORKER),
    "/kvpool.v1.Pool/Renew": (_R, _W, _WORKER),
    "/kvpool.v1.Pool/Release": (_R, _W, _WORKER),
    "/kvpool.v1.Pool/Read": (_R, _WORKER),
    "/kvpool.v1.Pool/Write": (_W, _WORKER),
    "/kvpool.v1.Admin/Inspect": (_ADMIN,),
    "/kvpool.v1.Admin/Evict": (_ADMIN,),
    "/kvpool.v1.Admin/Pin": (_ADMIN,),
    "/kvpool.v1.Admin/Unpin": (_ADMIN,),
    "/kvpool.v1.Admin/SetQuota": (_ADMIN,),
    "/kvpool.v1.Admin/Quotas": (_ADMIN,),
    "/kvpool.v1.Admin/Gc": (_ADMIN,),
    "/kvpool.v1.Admin/Verify": (_ADMIN,),
    "/kvpool.v1.Admin/Tiers": (_ADMIN,),
    "/kvpool.v1.Admin/Drain": (_ADMIN,),
    "/kvpool.v1.Admin/Balance": (_ADMIN,),
    "/kvpool.v1.Access/WhoAmI": (),
    "/kvpool.v1.Access/SetRates": (_ADMIN,),
    "/kvpool.v1.Peer/Handover": (_WORKER,),
    "/kvpool.v1.Peer/Heads": (_WORKER,),
    "/kvpool.v1.Events/Watch": (_WORKER, _ADMIN),
    "/kvpool.v1.Router/Loads": (_WORKER, _ADMIN),
    "/kvpool.v1.Worker/Prefill": (_WORKER,),
    "/kvpool.v1.Worker/Decode": (_WORKER,),
    "/kvpool.v1.Worker/Status": (_WORKER, _ADMIN),
}
"""Any one of the rights is enough; none named: whoever has a token."""

_caller: ContextVar[Principal] = ContextVar("kvpool_caller", default=ANYBODY)
_recheck: ContextVar[Callable[[], object]] = ContextVar("kvpool_recheck", default=lambda: None)
_BEARER = "bearer "
_STRANGERS_PER_S = 1.0


def caller() -> Principal:
    """Who made the call that is being served here."""
    return _caller.get()


def recheck() -> None:
    """For calls that last: raises `AccessError` once the token by which this one was let in is revoked."""
    _recheck.get()()


@contextlib.contextmanager
def called_by(principal: Principal) -> Any:
    """Serve the block as if `principal` had called: for tests, and for what a server does in a caller's name."""
    token = _caller.set(principal)
    try:
        yield
    finally:
        _caller.reset(token)


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls in by token, right and rate, and writes down what operators do.

    `tokens` None: nobody is asked who they are. `rates`: what tenant-bound principals may per second.
    """

    def __init__(
        self, *, clock: Clock, tokens: TokenTable | None = None, rates: Rates | None = None, audit: AuditLog | None = None
    ) -> None:
        self._clock = clock
        self._tokens = tokens
        self._rates = rates
        self._audit = audit
        self._strangers = Bucket(_STRANGERS_PER_S, clock.now_ns())

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        """Called by gRPC for every call, before its request is read."""
        handler = await continuation(details)
        if handler is None:
            return None  # no such method: gRPC says so
        method, rights = details.method, METHODS.get(details.method)
        principal, refusal = self._admit(method, rights, details.invocation_metadata)
        _caller.set(principal)
        if self._tokens is not None and refusal is None:
            _recheck.set(partial(self._tokens.principal, _token_in(details.invocation_metadata)))
        if refusal is not None:
            handler = _refusing(handler, *refusal)
        if self._audit is not None and rights == (_ADMIN,) and self._worth_a_line(principal):
            handler = _audited(handler, self._audit, method, principal.name)
        return handler

    def _worth_a_line(self, principal: Principal) -> bool:
        """Of strangers one line a second: the log is rotated, so whoever may fill it may empty it."""
        now_ns = self._clock.now_ns()
        if principal is not _NOBODY:
            return True
        if self._strangers.wait_ns(now_ns, needed=1.0):
            return False
        self._strangers.take(1, now_ns)
        return True

    def _admit(self, method: str, rights: tuple[Right, ...] | None, metadata: Any) -> tuple[Principal, tuple[grpc.StatusCode, str] | None]:
        """Who calls, and why they may not (None: they may)."""
        if self._tokens is None:
            return ANYBODY, None
        try:
            principal = self._tokens.principal(_token_in(metadata))
        except AccessError as error:
            return _NOBODY, (grpc.StatusCode.UNAUTHENTICATED, str(error))
        if rights is None:
            return principal, (grpc.StatusCode.PERMISSION_DENIED, f"{method} has no entry in the table of rights, so nobody may call it")
        if not principal.may(*rights):
            needed = " or ".join(rights)
            why = f"{principal.name} may not call {method}: it needs the right {needed}; make a token with it (`kvpool token new --rights`)"
            return principal, (grpc.StatusCode.PERMISSION_DENIED, why)
        if self._rates is not None and principal.tenant is not None:
            wait_ns = self._rates.admit(principal.tenant, self._clock.now_ns())
            if wait_ns:
                why = f"tenant {principal.tenant} is above its rate; try again in {max(1, wait_ns // MS)} ms"
                return principal, (grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        return principal, None


_NOBODY = Principal(name="unknown")


def _token_in(metadata: Any) -> str:
    """The one bearer token of a call. Raises `AccessError`."""
    given = [value for key, value in metadata or () if key == TOKEN_HEADER]
    if not given:
        raise AccessError("this server wants a token: give --token-file (or Security(token_file=...)), made by `kvpool token new`")
    if len(given) > 1 or not isinstance(given[0], str) or not given[0].lower().startswith(_BEARER):
        raise AccessError("the metadata 'authorization' must be given once, as 'Bearer TOKEN'")
    return given[0][len(_BEARER) :].strip()


def _refusing(handler: Any, code: grpc.StatusCode, why: str) -> Any:
    """A handler like `handler` that only refuses. What a stranger sends is not even read: a message may have megabytes."""

    async def refuse(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.abort(code, why)

    async def refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> Any:
        await context.abort(code, why)
        yield

    if code is grpc.StatusCode.UNAUTHENTICATED:
        return grpc.stream_unary_rpc_method_handler(refuse, response_serializer=handler.response_serializer)
    return _rewrapped(handler, refuse, refuse_stream)


def _audited(handler: Any, audit: AuditLog, method: str, who: str) -> Any:
    """`handler`, whose calls are written down once they have ended, however they do."""

    def note(request: Any, context: grpc.aio.ServicerContext, ended: bool) -> None:
        code = context.code()
        outcome = "OK" if ended and not code else getattr(code, "name", None) or "CANCELLED"
        audit.write(who=who, peer=context.peer(), what=method.rpartition("/")[2], details=summary(request), outcome=outcome)

    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        ended = False
        try:
            response = await (handler.unary_unary or handler.stream_unary)(request, context)
            ended = True
            return response
        finally:
            note(request, context, ended)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> Any:
        ended = False
        try:
            async for response in (handler.unary_stream or handler.stream_stream)(request, context):
                yield response
            ended = True
        finally:
            note(request, context, ended)

    return _rewrapped(handler, answer, stream)


def _rewrapped(handler: Any, unary: Any, stream: Any) -> Any:
    """A handler of the same shape: `unary` where it answers once, `stream` where it answers many times."""
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = kinds[handler.request_streaming, handler.response_streaming]
    return make(stream if handler.response_streaming else unary, handler.request_deserializer, handler.response_serializer)


def summary(request: Any) -> dict[str, object]:
    """A request's fields in few words: counts of lists, bytes by length, texts cut at 200 characters."""
    if not hasattr(request, "ListFields"):
        return {}
    out: dict[str, object] = {}
    for descriptor, value in request.ListFields():
        if isinstance(value, (bool, int, float)):
            out[descriptor.name] = value
        elif isinstance(value, str):
            out[descriptor.name] = value[:200]
        else:
            out[descriptor.name] = f"{len(value)} bytes" if isinstance(value, bytes) else _first(value)
    return out


def _first(values: Any) -> str:
    """How many, and for keys the first of them."""
    try:
        count = len(values)
    except TypeError:
        return "message"
    shown = values[0].hex() if count and isinstance(values[0], bytes) else ""
    return f"{count} items" + (f", first {shown[:64]}" if shown else "")
