"""Fields of a line, checked: each reader says what it wants, and what is wrong is said with the field's name."""

import json
import math
from typing import Any

from kvpool.errors import ConfigError

MAX_TOKENS = 1 << 27
"""In one prompt or answer: anything beyond is damage."""


def json_object(line: str) -> dict[str, Any]:
    """The JSON object on `line`. Raises `ConfigError`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object")
    return value


def number(fields: dict[str, Any], name: str) -> float:
    """A finite number, 0 or more. Raises `ConfigError`."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{name} must be a number, 0 or more, got {value!r:.80}")
    return value


def count(fields: dict[str, Any], name: str, least: int = 0) -> int:
    """A whole number of tokens, `least` or more. Raises `ConfigError`."""
    value = number(fields, name)
    if value != int(value) or not least <= value <= MAX_TOKENS:
        raise ConfigError(f"{name} must be a whole number from {least} to {MAX_TOKENS}, got {value!r:.80}")
    return int(value)


def ids(fields: dict[str, Any], name: str, tokens: int, block_tokens: int) -> tuple[object, ...]:
    """Names of blocks, whole numbers or text, no more than `tokens` fill. Raises `ConfigError`."""
    value = fields.get(name)
    if not isinstance(value, list) or not all(isinstance(id, int | str) and not isinstance(id, bool) for id in value):
        raise ConfigError(f"{name} must be a list of block ids, got {value!r:.80}")
    most = -(-tokens // block_tokens)
    if len(value) > most:
        raise ConfigError(f"{name} has {len(value)} blocks, but {tokens} tokens fill {most} of {block_tokens}")
    return tuple(value)


def label(fields: dict[str, Any], name: str) -> str:
    """Text, or a number as text; "" when it isn't there. Raises `ConfigError`."""
    value = fields.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{name} must be text, got {value!r:.80}")
    return str(value)
