"""The answers' JSON: whole and in chunks, for chat and plain completions."""

from dataclasses import dataclass
from typing import Any

from router.job import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Spells one request's answer; `created` is Unix seconds."""

    chat: bool
    id: str
    model: str
    created: int

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any], extension: dict[str, Any]) -> dict[str, Any]:
        """An answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        return {**self._head(streamed=False), "choices": [choice], "usage": usage, "kvpool": extension}

    def chunk(self, text: str | None, *, finish_reason: str | None = None, first: bool = False) -> dict[str, Any]:
        """One chunk of a stream. `first` names the role (chat)."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.chat:
            delta: dict[str, str] = {"role": "assistant"} if first else {}
            if text is not None:
                delta["content"] = text
            choice["delta"] = delta
        else:
            choice["text"] = text or ""
        return {**self._head(streamed=True), "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        """The extra last chunk of `stream_options.include_usage`, without its usage."""
        return {**self._head(streamed=True), "choices": []}

    def _head(self, *, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self.chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_of(prompt_tokens: int, trace: Trace) -> dict[str, Any]:
    """OpenAI's usage; the stop token counts as generated, as it was."""
    completion_tokens = len(trace.generated)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": trace.cached_tokens},
    }


def extension_of(trace: Trace, *, token_ids: bool) -> dict[str, Any]:
    """The `kvpool` object: who served, where the KV came from, where the time went; with `token_ids` the generated tokens too."""
    extension = {
        "prefill_worker": trace.prefill_worker,
        "decode_worker": trace.decode_worker,
        "sources": _sources(trace.sources),
        "decode_sources": _sources(trace.decode_sources),
        "retries": trace.retries,
        "fallbacks": list(trace.fallbacks),
        "times_ms": trace.times_ms(),
    }
    return {**extension, "token_ids": list(trace.generated)} if token_ids else extension


def _sources(sources: Any) -> dict[str, int] | None:
    return None if sources is None else {"resident": sources.resident, "pool": sources.pool, "computed": sources.computed}
