"""Qwen-Bailian's traces (ATC'25, alibaba-edu/qwen-bailian-usagetraces-anon): a JSON object a line.

`timestamp` in seconds, `input_length`, `output_length`, `type`, `turn`, `chat_id` and `parent_chat_id` (-1: the first turn), and
`hash_ids`, one per 16 tokens. These hash a block by itself, so equal ids share KV only where everything before is equal too; numbering
along chains takes care of that. A session is named by the chat that began it; a parent from before the trace begins one too.
"""

from collections.abc import Iterable, Iterator

from kvpool.errors import ConfigError
from kvpool.replay.traces.fields import count, ids, json_object, label, number
from kvpool.replay.traces.values import RawRequest
from kvpool.units import SECOND

FORMAT = "qwen-bailian"
BLOCK_TOKENS = 16


def matches(line: str) -> bool:
    """Whether a file that begins with `line` is one."""
    return line.startswith("{") and all(f'"{name}"' in line for name in ("chat_id", "parent_chat_id", "hash_ids"))


def read(lines: Iterable[str]) -> Iterator[RawRequest]:
    """One request a line. Raises `ConfigError` for the first that isn't one."""
    sessions: dict[int, str] = {}
    for line in lines:
        fields = json_object(line)
        tokens = count(fields, "input_length", 1)
        chat, parent = fields.get("chat_id"), fields.get("parent_chat_id")
        if type(chat) is not int or type(parent) is not int:
            raise ConfigError(f"chat_id and parent_chat_id must be whole numbers, got {chat!r:.40} and {parent!r:.40}")
        session = sessions[chat] = sessions.get(parent, str(chat if parent < 0 else parent))
        yield RawRequest(
            int(number(fields, "timestamp") * SECOND),
            tokens,
            count(fields, "output_length"),
            ids(fields, "hash_ids", tokens, BLOCK_TOKENS),
            session,
            count(fields, "turn"),
            kind=label(fields, "type"),
        )
