"""A run as text that people read: one line a call the node handled, a fault, a life."""

from collections.abc import Callable
from enum import Enum
from typing import Any

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.pool import Acquired, Granted, Reserve, Reserved
from kvpool.testing.sim.loop import Loop
from kvpool.units import MS, format_ns


class Transcript:
    """Writes lines such as `    1.234567 ms  c2     reserve c2.0 2.0 ms [b3:200<b2]  ->  lease 7: b3@128`."""

    def __init__(self, loop: Loop, names: dict[BlockKey, str], write_line: Callable[[str], None]) -> None:
        self._loop = loop
        self._names = names
        self._write_line = write_line

    def __call__(self, who: str, what: str, arguments: tuple[Any, ...], outcome: Any) -> None:
        """Write one line."""
        items = arguments[2] if what == "reserve" else ()
        text = " ".join(
            self._spell(argument, lease=what in ("reserve", "acquire", "renew", "pin") and i == 1) for i, argument in enumerate(arguments)
        )
        line = f"{self._loop.now_ns / MS:12.6f} ms  {who:6} {what} {text}".rstrip()
        spelled = self._answer(items, arguments, outcome) if what != "describe" else ""
        self._write_line(f"{line}  ->  {spelled}" if spelled else line)

    def _spell(self, value: Any, *, lease: bool = False) -> str:
        if isinstance(value, bytes):
            return self._name(value) if len(value) == KEY_BYTES and value in self._names else f"{len(value)} bytes"
        if isinstance(value, Reserve):
            ttl = f":{format_ns(value.ttl_ns)}" if value.ttl_ns else ""
            return f"{self._name(value.key)}:{value.length}{ttl}" + (f"<{self._name(value.parent)}" if value.parent else "")
        if isinstance(value, list | tuple):
            return "[" + " ".join(self._spell(item) for item in value) + "]"
        return format_ns(value) if lease else str(value)

    def _answer(self, items: Any, arguments: tuple[Any, ...], outcome: Any) -> str:
        if isinstance(outcome, Reserved):
            grants = [
                f"{self._name(item.key)}{f'@{grant.offset}' if isinstance(grant, Granted) else ' ' + grant.name}"
                for item, grant in zip(items, outcome.grants, strict=True)
            ]
            moves = [f"moved {move.source}+{move.size}>{move.target}" for move in outcome.moves]
            return f"lease {outcome.lease_id}: " + " ".join(moves + grants)
        if isinstance(outcome, Acquired):
            return f"lease {outcome.lease_id}: " + " ".join("miss" if at is None else f"@{at.offset}+{at.length}" for at in outcome.found)
        if isinstance(outcome, tuple):
            return " ".join(self._answer(items, arguments, item) for item in outcome)
        if isinstance(outcome, bool):
            return "yes" if outcome else "no"
        if isinstance(outcome, bytes):
            return "".join(map(str, outcome)) if len(outcome) <= 8 and set(outcome) <= {0, 1} else f"{len(outcome)} bytes"
        return outcome.name if isinstance(outcome, Enum) else str(outcome)

    def _name(self, key: bytes) -> str:
        return self._names.get(BlockKey(key)) or key.hex()[:8]
