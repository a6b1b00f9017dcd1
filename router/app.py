"""The routes, as a Starlette application."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvpool.security.principal import Right
from router.api.errors import ApiError, internal, model_not_found, not_found, request_not_found, too_many_recordings
from router.api.parse import parse_chat, parse_completion, parse_tokenize
from router.decisions import spelled
from router.decisions.recorder import MAX_RECORDINGS
from router.endpoint import GenerateEndpoint
from router.http import HungUpError, read_body, request_id_of
from router.services import Services

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]


def build_app(services: Services, lifespan: Lifespan | None = None) -> Starlette:
    """The application; `lifespan` starts and stops what `services` needs."""
    pages = _Pages(services)
    chat = GenerateEndpoint(services, name="chat", parse=parse_chat)
    completion = GenerateEndpoint(services, name="completion", parse=parse_completion)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/models", pages.models, methods=["GET"]),
            Route("/v1/models/{model:path}", pages.model, methods=["GET"]),
            Route("/tokenize", pages.tokenize, methods=["POST"]),
            Route("/health", pages.health, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
            Route("/kvpool/record", pages.record, methods=["GET"]),
            Route("/kvpool/explain/{id}", pages.explain, methods=["GET"]),
        ],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error, HungUpError: _hung_up, Exception: _fault},
        lifespan=lifespan or _no_lifespan,
    )
    app.state.drain = services.recorder.close
    return app


class _Pages:
    """The endpoints that generate nothing."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def models(self, request: Request) -> Response:
        self._services.access.check(request, Right.READ)
        return JSONResponse({"object": "list", "data": self._models()})

    async def model(self, request: Request) -> Response:
        self._services.access.check(request, Right.READ)
        asked = request.path_params["model"]
        for model in self._models():
            if model["id"] == asked:
                return JSONResponse(model)
        raise model_not_found(asked, self._services.model.name)

    async def tokenize(self, request: Request) -> Response:
        services = self._services
        services.access.check(request, Right.READ)
        with services.slot():
            asked = parse_tokenize(await read_body(request, services.limits.max_body_bytes, services.limits.client_timeout_s))
            tokens = await services.tokens_of(asked.text, asked.messages, asked.tools)
        return JSONResponse({"tokens": tokens, "count": len(tokens)}, headers={"x-request-id": request_id_of(request)})

    async def health(self, request: Request) -> Response:
        fleet = self._services.dispatcher.fleet
        workers = {role: len(fleet.alive(role)) for role in ("prefill", "decode")}
        if workers["decode"]:
            return JSONResponse({"status": "ok", "model": self._services.model.name, "workers": workers})
        detail = f"no decode worker serves {self._services.model.name}"
        return JSONResponse({"status": "unavailable", "detail": detail, "workers": workers}, status_code=503)

    async def metrics(self, request: Request) -> Response:
        self._services.access.check(request, Right.ADMIN)
        return Response(self._services.metrics.render(), media_type="text/plain; version=0.0.4")

    async def explain(self, request: Request) -> Response:
        """For an operator, and for the tenant whose request it was; to others it is one that never was."""
        principal = self._services.access.check(request)
        id = request.path_params["id"]
        found = self._services.decisions.find(id)
        own = found is not None and principal.tenant is not None and principal.tenant == found.tenant
        if found is None or not (own or principal.may(Right.ADMIN)):
            raise request_not_found(id)
        return JSONResponse(spelled(found), headers={"x-request-id": request_id_of(request)})

    async def record(self, request: Request) -> Response:
        """What ends from now on, a line each, until the caller hangs up or the server stops."""
        services = self._services
        services.access.check(request, Right.ADMIN)
        if services.recorder.full:
            raise too_many_recordings(MAX_RECORDINGS)
        headers = {"x-request-id": request_id_of(request), "cache-control": "no-cache", "x-accel-buffering": "no"}
        lines = services.recorder.lines(services.model.name, services.clock.now_ns())
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)

    def _models(self) -> list[dict[str, Any]]:
        """The model, then the adapters of engines, which have it as their parent."""
        services, name = self._services, self._services.model.name
        common = {"object": "model", "created": services.started_s, "owned_by": "kvpool"}
        adapters = [{"id": one, **common, "parent": name, "max_model_len": room} for one, room in services.adapters().items()]
        return [{"id": name, **common, "max_model_len": services.context_tokens()}, *adapters]


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _told(request, error, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _told(request, not_found(request.url.path), {})
    wrong = ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}", code="method_not_allowed")
    return _told(request, wrong, error.headers or {})


async def _hung_up(request: Request, error: Exception) -> Response:
    """Nobody is there to read it."""
    return Response(status_code=499)


async def _fault(request: Request, error: Exception) -> Response:
    return _told(request, internal(), {})


def _told(request: Request, error: ApiError, headers: Mapping[str, str]) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers={**headers, "x-request-id": request_id_of(request)})


@asynccontextmanager
async def _no_lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
