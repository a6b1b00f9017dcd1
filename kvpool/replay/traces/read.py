"""Opens a trace of any known format; what is wrong is told with the file's name and the number of the line."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError
from kvpool.replay.traces import azure, bailian, mooncake, own
from kvpool.replay.traces.values import Trace, make_trace

FORMATS = (own.FORMAT, mooncake.FORMAT, bailian.FORMAT, azure.FORMAT)
MAX_LINE_CHARS = 64 << 20

_KNOWN = "known are a kvpool recording, Mooncake JSONL, Qwen-Bailian JSONL and Azure CSV (docs/replay.md)"


class _Lines:
    """The lines of a file that hold something, and the number of the last one that was given."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        with self._path.open(encoding="utf-8-sig") as file:
            while line := file.readline(MAX_LINE_CHARS):
                self.number += 1
                if len(line) == MAX_LINE_CHARS:
                    raise ConfigError(f"the line is longer than {MAX_LINE_CHARS} characters")
                if line.strip():
                    yield line


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """The trace in file `path`, its first `limit` requests if given. Raises `ConfigError`: PATH:LINE: what is wrong."""
    lines = _Lines(path)
    own_reader = own.Reader()
    try:
        format = _format_of(next(iter(_Lines(path)), ""))
        raws = list(islice(own_reader.read(lines) if format is own else format.read(lines), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read trace {path}: {error}") from error
    except ConfigError as error:
        where = f"{path}:{lines.number}" if lines.number else str(path)
        raise ConfigError(f"{where}: {error}") from None
    block_tokens = own_reader.block_tokens if format is own else format.BLOCK_TOKENS
    return make_trace(path.stem, format.FORMAT, block_tokens, raws, own_reader.lost)


def _format_of(line: str) -> Any:
    """The module that reads the file that begins with `line`."""
    for format in (own, bailian, mooncake, azure):
        if format.matches(line):
            return format
    raise ConfigError(f"no known trace; {_KNOWN}" if line else f"the file is empty; {_KNOWN}")
