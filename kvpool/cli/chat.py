"""A small client of the OpenAI-compatible endpoint that measures what a user feels. Standard library only, one connection a call."""

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvpool.cli.credentials import https_context, security
from kvpool.cli.http import authorization, call
from kvpool.errors import DeadlineError, ProtocolError, UnavailableError
from kvpool.wire.credentials import Security

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One streamed answer. Times in seconds, from the client's side; `extension` is the router's `kvpool` object."""

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float
    extension: Mapping[str, Any]

    @property
    def tokens_per_s(self) -> float:
        """Generation speed after the first token; 0 when there was only one."""
        span_s = self.total_s - self.ttft_s
        return (len(self.tokens) - 1) / span_s if len(self.tokens) > 1 and span_s > 0 else 0.0


class ChatClient:
    """Talks to the router at `url`."""

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s

    def model(self) -> str:
        """The served model's name."""
        return str(call(f"{self._url}/v1/models", timeout_s=self._timeout_s)["data"][0]["id"])

    def prompt_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of the prompt that `messages` become."""
        answer = call(f"{self._url}/tokenize", body={"messages": list(messages)}, timeout_s=self._timeout_s)
        return list(answer["tokens"])

    def chat(self, messages: Sequence[Message], *, model: str, max_tokens: int, temperature: float = 0.0, attention: str = "") -> Reply:
        """Stream one answer, decoded with the technique `attention`. Raises `UnavailableError` with the server's words when it refuses."""
        body: dict[str, Any] = {
            "model": model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **({"kvpool_attention": attention} if attention else {}),
        }
        started, first = time.monotonic(), 0.0
        text, usage, extension = "", dict[str, Any](), dict[str, Any]()
        for event in self._events("/v1/chat/completions", body):
            for choice in event.get("choices", ()):
                piece = choice.get("delta", {}).get("content")
                if piece and not first:
                    first = time.monotonic()
                text += piece or ""
            usage = event.get("usage") or usage
            extension = event.get("kvpool") or extension
        ended = time.monotonic()
        try:
            return Reply(
                text=text,
                tokens=tuple(extension["token_ids"]),
                prompt_tokens=usage["prompt_tokens"],
                cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
                ttft_s=(first or ended) - started,
                total_s=ended - started,
                extension=extension,
            )
        except KeyError as error:
            raise ProtocolError(f"the answer ended without {error}") from error

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        response = self._post(path, body)
        try:
            for raw in response:
                line = raw.strip()
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise UnavailableError(f"the stream ended early: {event['error'].get('message')}")
                yield event
        except TimeoutError as error:
            raise DeadlineError(f"no event for {self._timeout_s:.0f} s") from error

    def _post(self, path: str, body: Mapping[str, Any]) -> http.client.HTTPResponse:
        credentials = security()
        headers = {"content-type": "application/json", "connection": "close", **authorization(self._url, credentials)}
        connection = _connection(self._url, credentials, self._timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
        except TimeoutError as error:
            raise DeadlineError(f"{path}: no answer within {self._timeout_s:.0f} s") from error
        except OSError as error:
            raise UnavailableError(f"can't reach {self._url}: {error}") from error
        if response.status != http.client.OK:
            raise UnavailableError(f"{path}: HTTP {response.status}: {response.read(2000).decode(errors='replace')}")
        return response


def _connection(url: str, credentials: Security, timeout_s: float) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port or 443, timeout=timeout_s, context=https_context(credentials))
    return http.client.HTTPConnection(host, parts.port or 80, timeout=timeout_s)
