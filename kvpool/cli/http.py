"""The little HTTP the CLI speaks to a router, with the standard library: no proxy, one time limit, kvpool errors."""

import json
import urllib.error
import urllib.request
from typing import Any

from kvpool.errors import ConfigError, KvpoolError, ProtocolError, UnavailableError

MAX_ANSWER_BYTES = 16 << 20
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(url: str, *, body: Any = None, timeout_s: float) -> Any:
    """GET `url`, or POST `body` as JSON; the JSON answer.

    Raises `UnavailableError` (no answer in time, or a 5xx), `ConfigError` (a 4xx, with the server's message), `ProtocolError`.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"} if data else {})
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            text = answer.read(MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        with error:
            words = error.read(2000).decode(errors="replace").strip()
        kind: type[KvpoolError] = UnavailableError if error.code >= 500 else ConfigError
        raise kind(f"{url} answered {error.code}: {words}") from error
    except OSError as error:
        raise UnavailableError(f"{url} can't be reached: {getattr(error, 'reason', error)}") from error
    try:
        return json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"{url} answered something that is not JSON") from error


def healthy(router_url: str, *, timeout_s: float) -> bool:
    """True when the router at `router_url` answers /health with success."""
    try:
        call(f"{router_url}/health", timeout_s=timeout_s)
    except KvpoolError:
        return False
    return True
