"""From the bytes of a request body to what is asked (`Ask`), or to the error that says which field is wrong."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from kvpool.engine.attention.settings import parse_attention, spell_attention
from kvpool.errors import ConfigError
from kvpool.request import Sampling
from router.api.errors import ApiError, bad_request, model_not_found, unsupported
from router.api.messages import check_messages, plain_messages
from router.api.schema import MAX_CHOICES, ChatBody, CompletionBody, TokenizeBody, extras
from router.api.unsupported import check_supported

B = TypeVar("B", bound=BaseModel)

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions; a chat answer may fill the context."""

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One generation request in plain values. Of `messages` and `prompts` exactly one holds something."""

    chat: bool
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    parallel_tool_calls: bool = True
    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    n: int
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignore_eos: bool
    return_token_ids: bool
    stream: bool
    include_usage: bool
    cache_salt: str = ""
    user: str = ""
    session: str = ""
    priority: int = 0
    attention: str = ""
    adapter: str = ""
    """The LoRA adapter that was asked for as a model; "" for the served model itself."""
    timeout_s: float | None = None

    @property
    def prompt_param(self) -> str:
        """The field that holds the prompt, for error messages."""
        return "messages" if self.chat else "prompt"


def parse_chat(body: bytes, *, model: str, seed: int, adapters: Collection[str] = ()) -> Ask:
    """A /v1/chat/completions body for `model` or one of its `adapters`; `seed` is used when the caller gives none. Raises `ApiError`."""
    fields = _fields(body, model, adapters, ChatBody)
    check_messages(fields)
    chat = _validated(ChatBody, fields)
    if chat.top_logprobs is not None and not chat.logprobs:
        raise bad_request("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    limit = chat.max_completion_tokens if chat.max_completion_tokens is not None else chat.max_tokens
    tools = tuple(tool.model_dump(exclude_unset=True) for tool in chat.tools or ())
    if chat.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "the model decides whether and what to call: use auto or none")
    return Ask(
        chat=True,
        messages=plain_messages(chat.messages),
        tools=() if chat.tool_choice == "none" else tools,
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        max_tokens=limit,
        adapter=_adapter(chat.model, model),
        **_common(chat, seed, (chat.top_logprobs or 0) if chat.logprobs else None),
    )


def parse_completion(body: bytes, *, model: str, seed: int, adapters: Collection[str] = ()) -> Ask:
    """A /v1/completions body, as `parse_chat`. Raises `ApiError`."""
    fields = _fields(body, model, adapters, CompletionBody)
    completion = _validated(CompletionBody, fields)
    if completion.best_of not in (None, completion.n or 1):
        raise unsupported("best_of", "all n answers are given; choose among them")
    if completion.echo and completion.logprobs is not None:
        raise unsupported("echo", "with logprobs: prompts are not computed again, so their log-probabilities are not known")
    given: Any = completion.prompt
    prompts = given if isinstance(given, list) and given and isinstance(given[0], (str, list)) else [given]
    if not all(prompts):
        raise bad_request("prompt must not be empty.", param="prompt")
    common = _common(completion, seed, completion.logprobs)
    if len(prompts) * common["n"] > MAX_CHOICES:
        raise bad_request(f"Invalid value for prompt: {len(prompts)} prompts with n={common['n']} are over {MAX_CHOICES}.", param="prompt")
    return Ask(
        chat=False,
        prompts=tuple(prompt if isinstance(prompt, str) else tuple(prompt) for prompt in prompts),
        echo=bool(completion.echo),
        max_tokens=completion.max_tokens if completion.max_tokens is not None else COMPLETION_MAX_TOKENS,
        adapter=_adapter(completion.model, model),
        **common,
    )


def _adapter(asked: str, model: str) -> str:
    return "" if asked == model else asked


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeAsk:
    """What to tokenise: `text`, or a conversation."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


def parse_tokenize(body: bytes) -> TokenizeAsk:
    """A /tokenize body. Raises `ApiError`."""
    fields = _object(body)
    check_messages(fields, needed=False)
    asked = _validated(TokenizeBody, fields)
    if (asked.text is None) == (asked.messages is None):
        raise bad_request("give either text or messages.", param="text")
    tools = tuple(tool.model_dump(exclude_unset=True) for tool in asked.tools or ())
    return TokenizeAsk(text=asked.text, messages=plain_messages(asked.messages or []), tools=tools)


def _common(body: ChatBody | CompletionBody, seed: int, logprobs: int | None) -> dict[str, Any]:
    """The fields both endpoints share, defaults filled in."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed when stream is true.", param="stream_options")
    stops = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    return {
        "n": body.n or 1,
        "sampling": Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k or 0,
            seed=(seed if body.seed is None else body.seed) % 2**64,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
            logprobs=logprobs,
        ),
        "stops": stops,
        "stop_tokens": tuple(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "return_token_ids": bool(body.return_token_ids),
        "stream": bool(body.stream),
        "include_usage": body.stream_options is not None and bool(body.stream_options.include_usage),
        "cache_salt": body.cache_salt or "",
        "user": body.user or body.safety_identifier or "",
        "session": body.prompt_cache_key or "",
        "priority": body.priority or 0,
        "attention": _attention(body.kvpool_attention),
        "timeout_s": body.timeout,
    }


def _attention(text: str | None) -> str:
    """A technique as `parse_attention` spells it in full; "" when the caller doesn't choose."""
    try:
        return "" if text is None else spell_attention(parse_attention(text))
    except ConfigError as error:
        raise bad_request(f"Invalid value for kvpool_attention: {error}.", param="kvpool_attention") from None


def _fields(body: bytes, model: str, adapters: Collection[str], kind: type[BaseModel]) -> dict[str, Any]:
    """The JSON object of a generation request, its model and the parameters that `kind` doesn't have checked."""
    fields = _object(body)
    asked = fields.get("model")
    if asked is None:
        raise bad_request("you must provide a model parameter.", param="model", code="missing_required_parameter")
    if isinstance(asked, str) and asked != model and asked not in adapters:
        raise model_not_found(asked, model)
    check_supported({name: value for name, value in fields.items() if name not in kind.model_fields})
    return fields


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("The request body must be a JSON object.", code="invalid_json")
    return value


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
    """`messages[0].content` from a location, leaving out pydantic's names of union branches, and what the caller chose as a name."""
    spelled = str(detail["loc"][0])
    if spelled == "logit_bias":
        return spelled
    for step in detail["loc"][1:]:
        if isinstance(step, int):
            spelled += f"[{step}]"
        elif step.isidentifier() and step not in ("str", "int", "float", "bool", "NamedTool"):
            spelled += f".{step}"
    return spelled
