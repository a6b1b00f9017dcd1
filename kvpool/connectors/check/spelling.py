"""What an operator gives a check: a JSON configuration, or the engine's flags with that configuration among them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvpool.errors import ConfigError


def split_flags(flags: Sequence[str], option: str) -> tuple[list[str], str | None]:
    """The flags without `option` and its value, and that value; None where it isn't there. Raises `ConfigError` where it has none."""
    rest: list[str] = []
    value: str | None = None
    at = 0
    while at < len(flags):
        name, given, inline = flags[at].partition("=")
        if name != option:
            rest.append(flags[at])
        elif given:
            value = inline
        elif at + 1 < len(flags):
            at, value = at + 1, flags[at + 1]
        else:
            raise ConfigError(f"{option} is the last of the flags and has no value")
        at += 1
    return rest, value


def parse_object(text: str, what: str) -> Mapping[str, Any]:
    """A JSON object. Raises `ConfigError` that says where it isn't one."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{what} is not a JSON object")
    return found
