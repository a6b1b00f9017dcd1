"""Azure's traces (Azure/AzurePublicDataset, 2023 and 2024): CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`.

Times are dates with up to nine digits behind the second, some with a time zone. Nothing says which prompts have what in common.
"""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from kvpool.errors import ConfigError
from kvpool.replay.traces.fields import count
from kvpool.replay.traces.values import RawRequest
from kvpool.units import SECOND

FORMAT = "azure"
BLOCK_TOKENS = 0
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?\Z")


def matches(line: str) -> bool:
    """Whether a file that begins with `line` is one."""
    return line.strip() == HEADER


def read(lines: Iterable[str]) -> Iterator[RawRequest]:
    """One request a line, behind the header. Raises `ConfigError` for the first that isn't one."""
    for line in lines:
        if matches(line):
            continue
        cells = line.strip().split(",")
        if len(cells) != 3:
            raise ConfigError(f"{len(cells)} columns instead of {HEADER}")
        numbers = (int(cell) if cell.isascii() and cell.isdecimal() else cell for cell in cells)
        fields = dict(zip(HEADER.split(","), numbers, strict=True))
        yield RawRequest(_time_ns(cells[0]), count(fields, "ContextTokens", 1), count(fields, "GeneratedTokens"))


def _time_ns(text: str) -> int:
    found = _TIME.match(text)
    if found is None:
        raise ConfigError(f"TIMESTAMP must be a date and a time, got {text[:40]!r}")
    try:
        when = datetime.fromisoformat(found[1] + (found[3] or "+00:00").replace("Z", "+00:00"))
    except ValueError as error:
        raise ConfigError(f"TIMESTAMP {text[:40]!r}: {error}") from None
    since = when - datetime(2000, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * SECOND + int((found[2] or "0").ljust(9, "0"))
