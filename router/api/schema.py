"""The request bodies, field by field. What is not named here is either in `unsupported` or ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from kvpool.request import MAX_ATTENTION_CHARS, MAX_LOGIT_BIAS, MAX_LOGPROBS
from router.api.messages import MAX_TOOLS, Message, Strict, Tool

MAX_STOPS = 4
MAX_STOP_TOKENS = 64
MAX_LABEL_CHARS = 256
MAX_STOP_CHARS = 256
MAX_CHOICES = 64
"""Answers to one request: prompts times `n`."""

_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Token = Annotated[int, Field(ge=0)]
_Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]
_TokenText = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class _Generation(Strict):
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[_TokenText, _Bias], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[_Token], Field(max_length=MAX_STOP_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_LABEL_CHARS)] | None = None
    user: _Label | None = None
    safety_identifier: _Label | None = None
    prompt_cache_key: _Label | None = None
    priority: int | None = Field(None, ge=-1000, le=1000)
    kvpool_attention: Annotated[str, Field(max_length=MAX_ATTENTION_CHARS)] | None = None
    timeout: float | None = Field(None, gt=0)


class NamedFunction(Strict):
    """The name of a tool's function."""

    name: str


class NamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(_Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: str | list[_Token] | list[str] | list[list[_Token]]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1)


class TokenizeBody(Strict):
    """POST /tokenize: one of the two; `tools` go with messages."""

    text: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


def extras(body: BaseModel) -> dict[str, Any]:
    """Fields of `body` that no schema names."""
    return body.model_extra or {}
