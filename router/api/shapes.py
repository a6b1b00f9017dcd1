"""The answers' JSON: whole and in chunks, for chat and plain completions."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from kvpool.engine.attention.settings import FULL
from router.job import Trace
from router.text.tool_calls import ToolCall

_MARK = "\0text\0"
"""Stands for the text in a template; no name of a model has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One choice of a whole answer. `logprobs` as `router/api/logprobs.py` spells them; `calls` are (id, call)."""

    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None = None
    calls: Sequence[tuple[str, ToolCall]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Spells one request's answer; `created` is Unix seconds. With `usage` every chunk says that its usage is null."""

    chat: bool
    id: str
    model: str
    created: int
    usage: bool = False
    _around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    def whole(self, said: Sequence[Said], usage: dict[str, Any], extension: dict[str, Any]) -> dict[str, Any]:
        """An answer that is not streamed."""
        choices = [self._whole(index, one) for index, one in enumerate(said)]
        return {**self._head(streamed=False), "choices": choices, "usage": usage, "kvpool": extension}

    def text_event(self, text: str, index: int = 0) -> bytes:
        """The event of one more piece of text and nothing else: by far the most frequent, so only the text is spelled anew."""
        around = self._around.get(index)
        if around is None:
            head, tail = encoded(self.chunk(_MARK, index=index)).split(encode_basestring(_MARK).encode())
            around = self._around[index] = head, tail
        return around[0] + encode_basestring(text).encode() + around[1]

    def chunk(
        self,
        text: str | None,
        *,
        index: int = 0,
        finish_reason: str | None = None,
        first: bool = False,
        logprobs: dict[str, Any] | None = None,
        calls: Sequence[tuple[int, str, ToolCall]] = (),
    ) -> dict[str, Any]:
        """One chunk of a stream. `first` names the role (chat); `calls` are (number, id, call)."""
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": finish_reason}
        if self.chat:
            delta: dict[str, Any] = {"role": "assistant"} if first else {}
            if text is not None:
                delta["content"] = text
            if calls:
                delta["tool_calls"] = [{"index": number, **_call(id, call)} for number, id, call in calls]
            choice["delta"] = delta
        else:
            choice["text"] = text or ""
        chunk = {**self._head(streamed=True), "choices": [choice]}
        return {**chunk, "usage": None} if self.usage else chunk

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The extra last chunk of `stream_options.include_usage`."""
        return {**self._head(streamed=True), "choices": [], "usage": usage}

    def _whole(self, index: int, said: Said) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "logprobs": said.logprobs, "finish_reason": said.finish_reason}
        if not self.chat:
            return {**choice, "text": said.text}
        message: dict[str, Any] = {"role": "assistant", "content": said.text, "refusal": None}
        if said.calls:
            message |= {"content": said.text or None, "tool_calls": [_call(id, call) for id, call in said.calls]}
        return {**choice, "message": message}

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def encoded(value: Any) -> bytes:
    """`value` as the data of one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _call(id: str, call: ToolCall) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def usage_of(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """OpenAI's usage; stop tokens count as generated, as they were."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def extension_of(trace: Trace, *, token_ids: bool) -> dict[str, Any]:
    """The `kvpool` object: who served, where the KV came from, where the time went; with `token_ids` the generated tokens too."""
    extension = {
        "prefill_worker": trace.prefill_worker,
        "decode_worker": trace.decode_worker,
        "sources": _sources(trace.sources),
        "decode_sources": _sources(trace.decode_sources),
        "attention": trace.attention or FULL,
        "retries": trace.retries,
        "fallbacks": list(trace.fallbacks),
        "times_ms": trace.times_ms(),
    }
    return {**extension, "token_ids": list(trace.generated)} if token_ids else extension


def _sources(sources: Any) -> dict[str, int] | None:
    return None if sources is None else {"resident": sources.resident, "pool": sources.pool, "computed": sources.computed}
