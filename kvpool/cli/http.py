"""The little HTTP the CLI speaks to a router, with the standard library: no proxy, one time limit, kvpool errors."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from kvpool.cli.credentials import https_context, security
from kvpool.errors import ConfigError, KvpoolError, ProtocolError, UnavailableError
from kvpool.wire.credentials import Security, is_loopback

MAX_ANSWER_BYTES = 16 << 20
STREAM_IDLE_S = 60.0


def call(url: str, *, body: Any = None, timeout_s: float, credentials: Security | None = None) -> Any:
    """GET `url`, or POST `body` as JSON; the JSON answer. `credentials` None: those that this command was given.

    Raises `UnavailableError` (no answer in time, or a 5xx), `ConfigError` (a 4xx, with the server's message), `ProtocolError`.
    """
    data = None if body is None else json.dumps(body).encode()
    text = _exchange(url, data, timeout_s, security() if credentials is None else credentials)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"{url} answered something that is not JSON") from error


def get_text(url: str, *, timeout_s: float) -> str:
    """GET `url`; the answer as text. Errors as `call`."""
    return _exchange(url, None, timeout_s, security()).decode(errors="replace")


def stream_lines(url: str, *, until_s: float | None = None) -> Iterator[str]:
    """GET `url` and give its lines as they come, until the server ends or the monotonic time `until_s`. Errors as `call`.

    A server that sends nothing for `STREAM_IDLE_S` counts as gone. The end may come later than `until_s` by as long as the server
    pauses between lines.
    """
    credentials = security()
    request = urllib.request.Request(url, headers=authorization(url, credentials))
    try:
        with _opener(url, credentials).open(request, timeout=_left_s(until_s)) as answer:
            while line := answer.readline(MAX_ANSWER_BYTES):
                yield line.decode(errors="replace")
                if until_s is not None and time.monotonic() >= until_s:
                    return
    except urllib.error.HTTPError as error:
        raise _refused(url, error) from error
    except OSError as error:
        if until_s is not None and time.monotonic() >= until_s:
            return
        raise UnavailableError(f"{url} can't be reached: {getattr(error, 'reason', error)}") from error


def _left_s(until_s: float | None) -> float:
    return STREAM_IDLE_S if until_s is None else min(STREAM_IDLE_S, max(0.05, until_s - time.monotonic()))


def _refused(url: str, error: urllib.error.HTTPError) -> KvpoolError:
    with error:
        words = error.read(2000).decode(errors="replace").strip()
    kind: type[KvpoolError] = UnavailableError if error.code >= 500 else ConfigError
    return kind(f"{url} answered {error.code}: {words}")


def _exchange(url: str, data: bytes | None, timeout_s: float, credentials: Security) -> bytes:
    headers = {"Content-Type": "application/json"} if data else {}
    headers.update(authorization(url, credentials))
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with _opener(url, credentials).open(request, timeout=timeout_s) as answer:
            text: bytes = answer.read(MAX_ANSWER_BYTES)
            return text
    except urllib.error.HTTPError as error:
        raise _refused(url, error) from error
    except OSError as error:
        raise UnavailableError(f"{url} can't be reached: {getattr(error, 'reason', error)}") from error


def _opener(url: str, credentials: Security) -> urllib.request.OpenerDirector:
    """Without proxies; for HTTPS with our certificates."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=https_context(credentials)))
    return urllib.request.build_opener(*handlers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A router never redirects; whoever does must not get our token."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Follow none."""


def authorization(url: str, credentials: Security) -> dict[str, str]:
    """The token, over TLS or to this machine only."""
    token = credentials.bearer()
    if token is None:
        return {}
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" and not is_loopback(parts.hostname or ""):
        raise ConfigError(f"a token would cross the network to {url} in the clear; serve the router over HTTPS")
    return {"Authorization": f"Bearer {token}"}


def healthy(router_url: str, *, timeout_s: float) -> bool:
    """True when the router at `router_url` answers /health with success."""
    try:
        call(f"{router_url}/health", timeout_s=timeout_s)
    except KvpoolError:
        return False
    return True
