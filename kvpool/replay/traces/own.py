"""Our own traces, as `kvpool record` writes them: a JSON object a line, the first says how to read the others.

First line: `{"kvpool_trace": 1, "block_tokens": 16, "model": "…"}`. Then one line for each request: `at_ms` (from the start of the
recording), `input` and `output` (tokens), `blocks` (hashes of the prompt's blocks, chained, the partial last one included), and as far as
known `session`, `tenant`, `cached` (tokens), `ttft_ms`, `total_ms`, `outcome`. `{"lost": n}`: so many could not be written.

There is no text in it and there are no token ids. Hashes and labels are keyed by a secret that is drawn for each recording and kept
nowhere: who has the file can tell what is equal in it, and can not try out texts. Lengths and times are what they were.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvpool.errors import ConfigError
from kvpool.replay.traces.fields import MAX_TOKENS, count, ids, json_object, label, number
from kvpool.replay.traces.values import RawRequest
from kvpool.units import MS

FORMAT = "kvpool"
VERSION = 1
_MARK = "kvpool_trace"


def matches(line: str) -> bool:
    """Whether a file that begins with `line` is one."""
    return line.startswith("{") and f'"{_MARK}"' in line


def spell_header(block_tokens: int, model: str) -> str:
    """The first line, without its end."""
    return json.dumps({_MARK: VERSION, "block_tokens": block_tokens, "model": model})


def spell(fields: Mapping[str, Any]) -> str:
    """Any other line, without its end."""
    return json.dumps(fields, separators=(",", ":"))


class Reader:
    """Reads one file; `block_tokens` is known once the first line was read, `lost` at the end."""

    def __init__(self) -> None:
        self.block_tokens = 0
        self.lost = 0

    def read(self, lines: Iterable[str]) -> Iterator[RawRequest]:
        """One request a line, behind the first. Raises `ConfigError` for the first that isn't one."""
        for line in lines:
            fields = json_object(line)
            if _MARK in fields:
                self._head(fields)
            elif not self.block_tokens:
                raise ConfigError(f"the first line must have {_MARK}")
            elif "lost" in fields:
                self.lost += count(fields, "lost")
            else:
                tokens = count(fields, "input", 1)
                blocks = ids(fields, "blocks", tokens, self.block_tokens)
                at_ns, output = int(number(fields, "at_ms") * MS), count(fields, "output")
                yield RawRequest(at_ns, tokens, output, blocks, label(fields, "session"), tenant=label(fields, "tenant"))

    def _head(self, fields: dict[str, Any]) -> None:
        if self.block_tokens:
            raise ConfigError("a second first line: these are two recordings, give them one by one")
        if fields[_MARK] != VERSION:
            raise ConfigError(f"version {fields[_MARK]!r:.20} of the format, this program reads {VERSION}")
        self.block_tokens = count(fields, "block_tokens", 1)
        if self.block_tokens > MAX_TOKENS:
            raise ConfigError("block_tokens is out of range")
