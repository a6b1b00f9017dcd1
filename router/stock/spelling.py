"""A decode request as vLLM's `/v1/completions` takes it, and what it streams back, as plain values. Token ids both ways, no text.

The router's stop tokens are the only ones: the engine's own end token is switched off (`ignore_eos`), and its defaults for sampling are
overridden, so that an engine answers like a worker of ours. What is generated already, after another engine failed, is part of the prompt;
the engine's draws begin anew there, from a seed of their own.
"""

from typing import Any, Final

import msgspec

from kvpool.errors import ProtocolError
from kvpool.request import DecodeRequest, FinishReason, Logprobs, Scope

SALT_MARK: Final = "kvpool-"
"""What the `cache_salt` of a request begins with that has a scope of its own; the scope's salt follows in hex."""
_TOKEN: Final = "token_id:"
_SEED_STEP: Final = 0x9E3779B97F4A7C15
_REASONS: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class Likely(msgspec.Struct):
    """`logprobs` of a choice; tokens are spelled `token_id:N`."""

    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class Choice(msgspec.Struct):
    """What is new of the answer."""

    token_ids: list[int] | None = None
    logprobs: Likely | None = None
    finish_reason: str | None = None


class Details(msgspec.Struct):
    """What usage says of the prompt, if the engine was told to (`--enable-prompt-tokens-details`)."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The last chunk's."""

    prompt_tokens_details: Details | None = None


class Chunk(msgspec.Struct):
    """One event of the stream."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(Chunk)


def completion_of(request: DecodeRequest, model: str) -> bytes:
    """The JSON body."""
    sampling, done = request.sampling, len(request.generated)
    seed = (sampling.seed + done * _SEED_STEP) % 2**64
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*request.prompt, *request.generated],
        "max_tokens": request.max_tokens - done,
        "stop_token_ids": list(request.stop_tokens),
        "ignore_eos": True,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed if seed < 2**63 else seed - 2**64,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "skip_special_tokens": False,
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if request.scope.salt:
        body["cache_salt"] = salt_of(request.scope)
    return msgspec.json.encode(body)


def salt_of(scope: Scope) -> str:
    """The `cache_salt` that keeps the KV of `scope` from everybody else's."""
    return SALT_MARK + scope.salt.hex()


def chunk_of(data: bytes) -> Chunk:
    """One event's data. Raises `ProtocolError`."""
    try:
        return _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"a chunk of a completion can't be read: {error}") from error


def tokens_of(choice: Choice, wanted: int | None) -> list[tuple[int, Logprobs | None]]:
    """The new tokens, with `wanted` alternatives each (None: no log-probabilities). Raises `ProtocolError`."""
    if choice.token_ids is None:
        raise ProtocolError("it tells no token ids; a stock engine must be vLLM 0.10.2 or later")
    if wanted is None:
        return [(token, None) for token in choice.token_ids]
    likely = choice.logprobs or Likely()
    if min(len(likely.token_logprobs), len(likely.top_logprobs)) < len(choice.token_ids):
        raise ProtocolError("it tells fewer log-probabilities than tokens")
    each = zip(choice.token_ids, likely.token_logprobs, likely.top_logprobs, strict=False)
    return [(token, _logprobs(chosen, top or {}, wanted)) for token, chosen, top in each]


def reason_of(choice: Choice) -> FinishReason | None:
    """Why it ended, if it did. Raises `ProtocolError` for an end that is none of an answer's (`abort`)."""
    if choice.finish_reason is None:
        return None
    reason = _REASONS.get(choice.finish_reason)
    if reason is None:
        raise ProtocolError(f"it ended the answer with {choice.finish_reason!r}")
    return reason


def _logprobs(chosen: float | None, top: dict[str, float], wanted: int) -> Logprobs:
    try:
        found = [(int(name.removeprefix(_TOKEN)), value) for name, value in top.items()]
    except ValueError:
        raise ProtocolError("it tells log-probabilities of tokens by their text, not by their ids") from None
    found.sort(key=lambda one: -one[1])
    return Logprobs(chosen=-9999.0 if chosen is None else chosen, top=tuple(found[:wanted]))
