"""Conversations and tools: from a body's fields to what a chat template takes."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from router.api.errors import bad_request, unsupported

MAX_TOOLS = 128
MAX_NAME_CHARS = 256

_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class Strict(BaseModel):
    """Takes a value of exactly the right type; keeps fields that it doesn't know, so that they can be looked at."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    """One text part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """`arguments` is JSON text."""

    name: _Name
    arguments: str = "{}"


class Called(Strict):
    """A call that the assistant made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One message of a conversation. `content` may be missing where there are `tool_calls`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None


class Function(Strict):
    """What a tool is called and takes (`parameters`: a JSON schema)."""

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


def check_messages(fields: dict[str, Any], *, needed: bool = True) -> None:
    """Say plainly what schema errors would say in riddles: no messages, images, the older form of calls. Raises `ApiError`."""
    messages = fields.get("messages")
    if messages == [] or (messages is None and needed):
        raise bad_request("messages must hold at least one message.", param="messages", code="missing_required_parameter")
    for at, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):
            continue
        where = f"messages[{at}]"
        if message.get("role") == "function" or message.get("function_call"):
            raise unsupported(where, "use tools, tool_calls and the role tool instead of functions")
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] != "text":
                raise unsupported(f"{where}.content", f"only text parts are understood, not {part['type'][:40]!r}")


def plain_messages(messages: list[Message]) -> tuple[dict[str, Any], ...]:
    """Messages as a chat template takes them. Raises `ApiError`.

    Text parts joined, `developer` (the newer name of `system`) as `system`, the arguments of calls as objects.
    """
    plain = []
    for at, message in enumerate(messages):
        if message.content is None and not message.tool_calls:
            raise bad_request(f"messages[{at}].content must be text.", param=f"messages[{at}].content")
        content = message.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        entry: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
        if message.tool_calls:
            entry["tool_calls"] = [_call(call, f"messages[{at}].tool_calls[{number}]") for number, call in enumerate(message.tool_calls)]
        if message.role == "tool":
            entry |= {name: value for name, value in (("tool_call_id", message.tool_call_id), ("name", message.name)) if value is not None}
        plain.append(entry)
    return tuple(plain)


def talks_of_tools(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a template that knows no tools would leave something out."""
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _call(call: Called, where: str) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        raise bad_request(f"{where}.function.arguments is not JSON.", param=f"{where}.function.arguments") from None
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
