"""The request bodies, field by field. What is not named here is either in `unsupported` or ignored."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_STOPS = 4
MAX_SALT_CHARS = 256
MAX_STOP_CHARS = 256

_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Token = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class TextPart(_Strict):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class _Generation(_Strict):
    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None


class ChatBody(_Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class CompletionBody(_Generation):
    """POST /v1/completions."""

    prompt: str | list[_Token] | list[str] | list[list[_Token]]


class TokenizeBody(_Strict):
    """POST /tokenize: one of the two."""

    text: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)


def plain_messages(messages: list[Message]) -> list[dict[str, str]]:
    """Messages as a chat template takes them: text parts joined, `developer` (the newer name of `system`) as `system`."""
    plain = []
    for message in messages:
        content = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
        plain.append({"role": "system" if message.role == "developer" else message.role, "content": content})
    return plain


def extras(body: BaseModel) -> dict[str, Any]:
    """Fields of `body` that no schema names."""
    return body.model_extra or {}
