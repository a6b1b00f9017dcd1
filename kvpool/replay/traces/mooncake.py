"""Mooncake's traces (FAST'25, kvcache-ai/Mooncake): a JSON object a line.

`timestamp` in milliseconds, `input_length`, `output_length`, and `hash_ids`, one per 512 tokens of the prompt, chained. Tools that
write the same form may add a `session_id`.
"""

from collections.abc import Iterable, Iterator

from kvpool.replay.traces.fields import count, ids, json_object, label, number
from kvpool.replay.traces.values import RawRequest
from kvpool.units import MS

FORMAT = "mooncake"
BLOCK_TOKENS = 512


def matches(line: str) -> bool:
    """Whether a file that begins with `line` is one."""
    return line.startswith("{") and all(f'"{name}"' in line for name in ("timestamp", "input_length", "hash_ids"))


def read(lines: Iterable[str]) -> Iterator[RawRequest]:
    """One request a line. Raises `ConfigError` for the first that isn't one."""
    for line in lines:
        fields = json_object(line)
        tokens = count(fields, "input_length", 1)
        blocks = ids(fields, "hash_ids", tokens, BLOCK_TOKENS)
        at_ns = int(number(fields, "timestamp") * MS)
        yield RawRequest(at_ns, tokens, count(fields, "output_length"), blocks, label(fields, "session_id"))
