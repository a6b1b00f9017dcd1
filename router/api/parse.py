"""From the bytes of a request body to what is asked (`Ask`), or to the error that says which field is wrong."""

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from kvpool.request import Sampling
from router.api.errors import ApiError, bad_request, model_not_found, unsupported
from router.api.schema import ChatBody, CompletionBody, TokenizeBody, extras, plain_messages
from router.api.unsupported import check_supported

B = TypeVar("B", bound=BaseModel)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; a chat answer may fill the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One generation request in plain values. Exactly one of `messages`, `text` and `tokens` is set."""

    chat: bool
    messages: tuple[dict[str, str], ...] | None = None
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    ignore_eos: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool
    cache_salt: str = ""

    @property
    def prompt_param(self) -> str:
        """The field that holds the prompt, for error messages."""
        return "messages" if self.chat else "prompt"


def parse_chat(body: bytes, *, model: str, seed: int) -> Ask:
    """A /v1/chat/completions body; `seed` is used when the caller gives none. Raises `ApiError`."""
    fields = _fields(body, model)
    _check_messages(fields)
    chat = _validated(ChatBody, fields)
    limit = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    return Ask(chat=True, messages=tuple(plain_messages(chat.messages)), max_tokens=limit, **_common(chat, seed))


def parse_completion(body: bytes, *, model: str, seed: int) -> Ask:
    """A /v1/completions body; `seed` is used when the caller gives none. Raises `ApiError`."""
    fields = _fields(body, model)
    completion = _validated(CompletionBody, fields)
    prompt: Any = completion.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise unsupported("prompt", "a list of several prompts; send one request per prompt")
        prompt = prompt[0]
    if not prompt:
        raise bad_request("prompt must not be empty.", param="prompt")
    limit = completion.max_tokens if completion.max_tokens is not None else COMPLETION_MAX_TOKENS
    text, tokens = (prompt, None) if isinstance(prompt, str) else (None, tuple(prompt))
    return Ask(chat=False, text=text, tokens=tokens, max_tokens=limit, **_common(completion, seed))


def parse_tokenize(body: bytes) -> tuple[str | None, tuple[dict[str, str], ...] | None]:
    """A /tokenize body: (text, None) or (None, messages). Raises `ApiError`."""
    fields = _object(body)
    _check_messages(fields, needed=False)
    asked = _validated(TokenizeBody, fields)
    if (asked.text is None) == (asked.messages is None):
        raise bad_request("give either text or messages.", param="text")
    return asked.text, tuple(plain_messages(asked.messages)) if asked.messages is not None else None


def _common(body: ChatBody | CompletionBody, seed: int) -> dict[str, Any]:
    """The fields both endpoints share, defaults filled in."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed when stream is true.", param="stream_options")
    stops = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    return {
        "sampling": Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            seed=(seed if body.seed is None else body.seed) % 2**64,
        ),
        "stops": stops,
        "ignore_eos": bool(body.ignore_eos),
        "return_token_ids": bool(body.return_token_ids),
        "stream": bool(body.stream),
        "cache_salt": body.cache_salt or "",
        "include_usage": body.stream_options is not None and bool(body.stream_options.include_usage),
    }


def _fields(body: bytes, model: str) -> dict[str, Any]:
    """The JSON object of a generation request, its model and unsupported parameters checked."""
    fields = _object(body)
    asked = fields.get("model")
    if asked is None:
        raise bad_request("you must provide a model parameter.", param="model", code="missing_required_parameter")
    if isinstance(asked, str) and asked != model:
        raise model_not_found(asked, model)
    check_supported(fields)
    return fields


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return value


def _check_messages(fields: dict[str, Any], *, needed: bool = True) -> None:
    """Say plainly what schema errors would say in riddles: no messages, tool messages, images."""
    messages = fields.get("messages")
    if messages == [] or (messages is None and needed):
        raise bad_request("messages must hold at least one message.", param="messages", code="missing_required_parameter")
    for at, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        where = f"messages[{at}]"
        if message.get("role") in ("tool", "function") or message.get("tool_calls"):
            raise unsupported(where, "tool calls are not implemented")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
                raise unsupported(f"{where}.content", f"only text parts are understood, not {part['type'][:40]!r}")


def _validated(kind: type[B], fields: dict[str, Any]) -> B:
    try:
        value = kind.model_validate(fields)
    except ValidationError as error:
        raise _schema_error(error) from None
    check_supported(extras(value))
    return value


def _schema_error(error: ValidationError) -> ApiError:
    """The first complaint; for a field of several allowed types, the one of the type that came closest (deepest location)."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    field = details[0]["loc"][0]
    same = [detail for detail in details if detail["loc"][0] == field]
    worst = max(same, key=lambda detail: (not detail["type"].endswith("_type"), len(detail["loc"])))
    param = _spell(worst)
    if worst["type"] == "missing":
        return bad_request(f"you must provide {param}.", param=param, code="missing_required_parameter")
    kinds = sorted({detail["msg"] for detail in same}) if worst["type"].endswith("_type") else [worst["msg"]]
    return bad_request(f"Invalid value for {param}: {'; or '.join(kinds)}.", param=param)


def _spell(detail: ErrorDetails) -> str:
    """`messages[0].content` from a location, leaving out pydantic's names of union branches."""
    spelled = str(detail["loc"][0])
    for step in detail["loc"][1:]:
        if isinstance(step, int):
            spelled += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int", "float", "bool"):
            spelled += f".{step}"
    return spelled
