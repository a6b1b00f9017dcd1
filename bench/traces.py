"""Request traces as a replay needs them: when, how many prompt tokens, which blocks.

Three kinds are read, told apart by what is in them:

* *Mooncake JSONL* (FAST'25): a line per request with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id per
  512 tokens of the prompt, chained: an id stands for its block and everything before it.
* *Coding conversations* (kv-cache-tester): a JSON file each, `block_size` 64, `requests` with `t` (s), `in` and `hash_ids` local to the
  conversation. A folder of them is one trace: conversation i starts `STAGGER_S` after conversation i - 1, ids don't meet.
* `synthetic:SEED`: made here. Sessions share a few system prompts by popularity, go on for a geometric number of turns, pause between
  them by a heavy-tailed time, and each turn adds to the prompt what was asked and answered.

Whatever the source, blocks are numbered 0, 1, 2... by first appearance, so that a replay can keep them in arrays.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvpool.errors import ConfigError
from kvpool.units import MS, SECOND

MOONCAKE_TOKENS = 512
STAGGER_S = 120
SYNTHETIC = "synthetic:"

_HELP = (
    "expected Mooncake JSONL (timestamp, input_length, output_length, hash_ids), a coding conversation (block_size, requests) or a "
    "folder of such, or synthetic:SEED"
)


class Request(NamedTuple):
    """One prompt: its arrival, its length in tokens, and its blocks from the head on."""

    at_ns: int
    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival; their blocks are numbers below `unique`, each standing for up to `block_tokens` tokens."""

    name: str
    block_tokens: int
    requests: tuple[Request, ...]
    unique: int

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.tokens for request in self.requests)

    @property
    def references(self) -> int:
        """Blocks of all requests."""
        return sum(len(request.blocks) for request in self.requests)


_Raw = tuple[int, int, Sequence[object]]  # at_ns, tokens, names of the blocks


def read_trace(source: str) -> Trace:
    """The trace at path `source`, or `synthetic:SEED`. Raises `ConfigError` when it is absent or in no known format."""
    if source.startswith(SYNTHETIC):
        seed = source.removeprefix(SYNTHETIC)
        if not seed.isdecimal():
            raise ConfigError(f"{source}: write a number behind the colon, such as synthetic:7")
        return _trace(source, MOONCAKE_TOKENS, _synthetic(Random(int(seed))))
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise ConfigError(f"{path} holds no *.json; {_HELP}")
        parts = [_conversation(file, index) for index, file in enumerate(files)]
        sizes = {tokens for tokens, _ in parts}
        if len(sizes) > 1:
            raise ConfigError(f"{path} mixes block sizes {sorted(sizes)}; put them into folders of their own")
        return _trace(path.name, sizes.pop(), (raw for _, raws in parts for raw in raws))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read trace {path}: {error}; {_HELP}") from error
    lines = text.splitlines()
    if lines and '"hash_ids"' in lines[0] and '"timestamp"' in lines[0]:
        return _trace(path.stem, MOONCAKE_TOKENS, _mooncake(path, lines))
    tokens, raws = _conversation(path, 0)
    return _trace(path.stem, tokens, raws)


def _trace(name: str, block_tokens: int, raws: Iterable[_Raw]) -> Trace:
    """Sort by time (equal times as they came) and number the blocks. A prompt ends before a block it has already."""
    numbers: dict[object, int] = {}
    requests = []
    for at_ns, tokens, names in sorted(raws, key=lambda raw: raw[0]):
        blocks = tuple(dict.fromkeys(numbers.setdefault(block, len(numbers)) for block in names))
        if blocks:
            requests.append(Request(at_ns, tokens, blocks))
    if not requests:
        raise ConfigError(f"trace {name} has no request with blocks; {_HELP}")
    return Trace(name=name, block_tokens=block_tokens, requests=tuple(requests), unique=len(numbers))


def _mooncake(path: Path, lines: Sequence[str]) -> Iterator[_Raw]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                fields = json.loads(line)
                yield int(fields["timestamp"] * MS), int(fields["input_length"]), tuple(map(int, fields["hash_ids"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{number}: not a Mooncake request ({error!r}); {_HELP}") from error


def _conversation(path: Path, index: int) -> tuple[int, list[_Raw]]:
    """Block size and requests of one conversation; its ids are named apart by `index`."""
    try:
        fields: Any = json.loads(path.read_text())
        start = index * STAGGER_S
        return int(fields["block_size"]), [
            (int((start + request["t"]) * SECOND), int(request["in"]), [(index, int(block)) for block in request["hash_ids"]])
            for request in fields["requests"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a conversation ({error!r}); {_HELP}") from error


def _synthetic(choice: Random, sessions: int = 3000) -> Iterator[_Raw]:
    """Requests of `sessions` sessions that start over an hour."""
    prompts = [choice.randrange(200, 6000) for _ in range(12)]  # tokens of each system prompt
    for session in range(sessions):
        at_s = choice.uniform(0, 3600)
        system = min(int(choice.paretovariate(0.8)) - 1, len(prompts) - 1)
        tokens = prompts[system] + int(choice.lognormvariate(8.2, 1.2))
        while True:
            tokens = min(tokens, 128 * 1024)
            shared = prompts[system] // MOONCAKE_TOKENS
            yield (
                int(at_s * SECOND),
                tokens,
                [_block_name(system, session, i, shared, tokens) for i in range(-(-tokens // MOONCAKE_TOKENS))],
            )
            if choice.random() < 0.4:
                break
            at_s += choice.lognormvariate(5.0, 1.5)
            tokens += int(choice.lognormvariate(6.0, 1.2)) + int(choice.lognormvariate(5.0, 1.0))


def _block_name(system: int, session: int, index: int, shared: int, tokens: int) -> tuple[int, ...]:
    """Shared blocks are named by the system prompt; the last block is named by its length too, for it grows with the next turn."""
    if index < shared:
        return (system, index)
    whole = (index + 1) * MOONCAKE_TOKENS <= tokens
    return (session, index, -1) if whole else (session, index, tokens)
