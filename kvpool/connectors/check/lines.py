"""One answer of a check: what was looked at, how it is, and what to do about it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`what` was looked at; `found` is how it is; `todo` says what to do, and is empty where nothing is to be done."""

    what: str
    state: State
    found: str
    todo: str = ""

    def as_json(self) -> dict[str, str]:
        """For programs."""
        return asdict(self)


def ok(what: str, found: str) -> Line:
    """It works."""
    return Line(what=what, state="ok", found=found)


def warn(what: str, found: str, todo: str) -> Line:
    """It works, but not as one would expect."""
    return Line(what=what, state="warn", found=found, todo=todo)


def fail(what: str, found: str, todo: str) -> Line:
    """The engine won't start, or won't use the pool."""
    return Line(what=what, state="fail", found=found, todo=todo)


Facts = Mapping[str, Mapping[str, Any]]
"""What the probe found, by step: `{"value": ...}`, or `{"error": "..."}`; a step that wasn't asked for is not there."""


def value(facts: Facts, step: str) -> Any:
    """What a step found; None if it failed or wasn't asked for."""
    return facts.get(step, {}).get("value")


def error(facts: Facts, step: str) -> str:
    """Why a step failed; empty if it didn't."""
    return str(facts.get(step, {}).get("error", ""))
