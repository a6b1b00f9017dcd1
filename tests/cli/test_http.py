"""The CLI's little HTTP client: every failure is a kvpool error with the address in it."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvpool.cli.http import call, healthy
from kvpool.errors import ConfigError, ProtocolError, UnavailableError


class Pages(BaseHTTPRequestHandler):
    answers = {"/ok": (200, b'{"a": 1}'), "/bad": (400, b"no such thing"), "/down": (503, b"later"), "/odd": (200, b"<html>")}  # noqa: RUF012

    def do_GET(self) -> None:
        code, body = self.answers[self.path]
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(30)


def test_call_answers_json(url: str) -> None:
    """The plain case."""
    assert call(f"{url}/ok", timeout_s=10) == {"a": 1}


@pytest.mark.parametrize(("page", "kind"), [("bad", ConfigError), ("down", UnavailableError), ("odd", ProtocolError)])
def test_call_failures_are_told_apart(url: str, page: str, kind: type[Exception]) -> None:
    """Our mistake, their trouble, and nonsense are three things."""
    with pytest.raises(kind, match=f"/{page}"):
        call(f"{url}/{page}", timeout_s=10)


def test_healthy_never_raises() -> None:
    """Readiness polls a router that isn't there yet."""
    assert not healthy("http://127.0.0.1:9", timeout_s=1)
