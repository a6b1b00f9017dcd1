"""One streamed completion over HTTP/1.1, timed: no more of HTTP than that takes, so that thousands cost the replay little."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kvpool.errors import ProtocolError, UnavailableError

MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A router: `http://host:port` or `https://…` (with `tls`), and headers for every request, such as an API key."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None


@dataclass(slots=True, kw_only=True)
class Result:
    """What became of one request. Seconds; `ttft_s` and `total_s` count from `sent_s`. `error` is "" or the code of the failure.

    `late_s`: how long after its time it was sent.
    """

    prompt_tokens: int
    late_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens; None for answers of one."""
        return (self.total_s - self.ttft_s) / (self.completion_tokens - 1) if self.completion_tokens > 1 else None


class Caller:
    """Asks one router; every call has a connection of its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        parts = urlsplit(endpoint.url)
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = endpoint.tls if parts.scheme == "https" else None
        self._headers = {"Host": parts.netloc, "Connection": "close", **endpoint.headers}

    async def get(self, path: str, timeout_s: float) -> Any:
        """GET a JSON value. Raises `UnavailableError`, `ProtocolError`."""
        return await self._json("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """POST a JSON value; the JSON answer. Raises `UnavailableError`, `ProtocolError`."""
        return await self._json("POST", path, body, timeout_s)

    async def complete(
        self, model: str, prompt: Sequence[int], max_tokens: int, *, session: str = "", timeout_s: float, late_s: float = 0.0
    ) -> Result:
        """Stream a completion of exactly `max_tokens` tokens; a failure is a result too."""
        result = Result(prompt_tokens=len(prompt), late_s=late_s)
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                headers = {"x-session-id": session} if session else {}
                await self._stream({**body, "stream_options": {"include_usage": True}}, headers, result, began)
        except TimeoutError:
            result.error = "replay_timeout"
        except (OSError, UnavailableError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            result.error = "connection"
        except (ProtocolError, ValueError, KeyError, TypeError):
            result.error = "protocol"
        result.total_s = time.monotonic() - began
        if not result.error and not result.completion_tokens:
            result.error = "incomplete"
        return result

    async def _stream(self, body: Mapping[str, Any], headers: Mapping[str, str], result: Result, began: float) -> None:
        reader, writer = await self._ask("POST", "/v1/completions", body, headers)
        try:
            status, chunked = await _head(reader)
            if status != 200:
                content = await reader.read(MAX_ANSWER_BYTES)
                result.error = _code_of(content) or f"http_{status}"
                return
            async for line in _lines(reader, chunked):
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    result.error = str(event["error"].get("code") or "error")
                    return
                if event.get("usage"):
                    usage = event["usage"]
                    result.completion_tokens = usage["completion_tokens"]
                    result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                elif not result.ttft_s:
                    result.ttft_s = time.monotonic() - began
        finally:
            writer.close()

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._ask(method, path, body, {})
                try:
                    status, chunked = await _head(reader)
                    content = b"\n".join([line async for line in _lines(reader, chunked)])
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise UnavailableError(f"{self._host}:{self._port}{path} does not answer: {error or 'it took too long'}") from error
        if status != 200:
            raise UnavailableError(f"{self._host}:{self._port}{path} answered {status}: {content[:500].decode(errors='replace')}")
        try:
            return json.loads(content)
        except ValueError as error:
            raise ProtocolError(f"{self._host}:{self._port}{path} answered something that is not JSON") from error

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        fields = {**self._headers, **headers, "Content-Type": "application/json", "Content-Length": str(len(content))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=MAX_LINE_BYTES)
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + content)
        await writer.drain()
        return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the body is chunked)."""
    first = (await reader.readline()).split()
    if len(first) < 2 or not first[1].isdigit():
        raise ProtocolError("not an HTTP answer")
    chunked = False
    while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        chunked |= name.strip().lower() == "transfer-encoding" and "chunked" in value.lower()
    return int(first[1]), chunked


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The lines of a body, wherever its pieces end; the body ends with the connection or with its last chunk."""
    held = b""
    async for piece in _pieces(reader, chunked):
        *lines, held = (held + piece).split(b"\n")
        if len(held) > MAX_ANSWER_BYTES:
            raise ProtocolError("a line of the answer has no end")
        for line in lines:
            yield line.rstrip(b"\r")
    if held:
        yield held


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while piece := await reader.read(1 << 16):
            yield piece
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


def _code_of(content: bytes) -> str:
    """The code in an error answer: the body's JSON object is between its first and last brace, chunked or not."""
    try:
        return str(json.loads(content[content.index(b"{") : content.rindex(b"}") + 1])["error"]["code"] or "")
    except (ValueError, KeyError, TypeError):
        return ""
