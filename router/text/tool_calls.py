"""Tool calls in an answer, in the form of Hermes, Qwen and SmolLM3::

    some text <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Text outside is passed through as it comes; what may be the beginning of a mark is held back. A call is known when its closing mark
has come, and is then given as a whole. What stands between marks and is no call (not JSON, no name) is text, marks included: nothing
the model said is lost.
"""

import json
from typing import NamedTuple

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL_CHARS = 1 << 20
"""A longer one is text."""


class ToolCall(NamedTuple):
    """`arguments` is JSON text, as OpenAI spells it."""

    name: str
    arguments: str


class ToolCallScanner:
    """Splits an answer into text and calls. With `single`, what comes after the first call is dropped and `full` is set."""

    def __init__(self, *, single: bool = False) -> None:
        self._single = single
        self._held = ""
        self._inside = False
        self.calls = 0
        self.full = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain now. White space around a call belongs to it."""
        said: list[str] = []
        calls: list[ToolCall] = []
        self._held += text
        while not self.full and self._step(said, calls):
            pass
        return "".join(said), calls

    def finish(self) -> str:
        """What was held back and turned out to be no call."""
        held, self._held = (OPEN if self._inside else "") + self._held, ""
        return "" if self.full or (self.calls and not held.strip()) else held

    def _step(self, said: list[str], calls: list[ToolCall]) -> bool:
        """One mark further; false when there is none yet."""
        mark = CLOSE if self._inside else OPEN
        before, found, after = self._held.partition(mark)
        if not found:
            if not self._inside:
                keep = _held_back(self._held)
                said.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
            elif len(self._held) > MAX_CALL_CHARS:
                said.append(OPEN + self._held)
                self._held, self._inside = "", False
            return False
        self._held = after
        if self._inside:
            call = _read(before)
            if call is None:
                said.append(OPEN + before + CLOSE)
            else:
                calls.append(call)
                self.calls += 1
                self.full = self._single
        else:
            said.append(before.rstrip())
        self._inside = not self._inside
        return True


def _held_back(text: str) -> int:
    """Length of the longest end of `text` that could still become white space and an opening mark."""
    for length in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-length:]):
            return len(text) - len(text[:-length].rstrip())
    return len(text) - len(text.rstrip())


def _read(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))
