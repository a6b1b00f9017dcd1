"""Request traces for the benches: what `kvpool.replay.traces` reads, and two kinds more.

* *Coding conversations* (kv-cache-tester): a JSON file each, `block_size` 64, `requests` with `t` (s), `in`, `out` and `hash_ids` local to
  the conversation. A folder of them is one trace: conversation i starts `STAGGER_S` after conversation i - 1, ids don't meet.
* `synthetic:SEED`: made here. Sessions share a few system prompts by popularity, go on for a geometric number of turns, pause between
  them by a heavy-tailed time, and each turn adds to the prompt what was asked and answered.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from kvpool.errors import ConfigError
from kvpool.replay.traces import RawRequest, Trace, make_trace
from kvpool.replay.traces import read_trace as read_file
from kvpool.units import SECOND

STAGGER_S = 120
SYNTHETIC = "synthetic:"
_TOKENS = 512  # of a block of a synthetic trace


def read_trace(source: str) -> Trace:
    """The trace at path `source`, or `synthetic:SEED`. Raises `ConfigError` when it is absent, in no known format, or names no blocks."""
    trace = _read(source)
    if not trace.unique:
        raise ConfigError(f"trace {trace.name} names no blocks, and so nothing that could be hit")
    return trace


def _read(source: str) -> Trace:
    if source.startswith(SYNTHETIC):
        seed = source.removeprefix(SYNTHETIC)
        if not seed.isdecimal():
            raise ConfigError(f"{source}: write a number behind the colon, such as synthetic:7")
        return make_trace(source, "synthetic", _TOKENS, _synthetic(Random(int(seed))))
    path = Path(source)
    if not path.is_dir():
        return _conversations(path.stem, [path]) if path.suffix == ".json" else read_file(path)
    files = sorted(path.glob("*.json"))
    if not files:
        raise ConfigError(f"{path} holds no *.json; expected a folder of coding conversations")
    return _conversations(path.name, files)


def _conversations(name: str, files: list[Path]) -> Trace:
    parts = [_conversation(file, index) for index, file in enumerate(files)]
    sizes = {tokens for tokens, _ in parts}
    if len(sizes) > 1:
        raise ConfigError(f"{name} mixes block sizes {sorted(sizes)}; put them into folders of their own")
    return make_trace(name, "conversations", sizes.pop(), (raw for _, raws in parts for raw in raws))


def _conversation(path: Path, index: int) -> tuple[int, list[RawRequest]]:
    """Block size and requests of one conversation; its ids are named apart by `index`."""
    try:
        fields: Any = json.loads(path.read_text())
        start = index * STAGGER_S
        return int(fields["block_size"]), [
            RawRequest(
                int((start + request["t"]) * SECOND),
                int(request["in"]),
                int(request["out"]),
                [(index, int(block)) for block in request["hash_ids"]],
                str(index),
            )
            for request in fields["requests"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"can't read trace {path}: not a coding conversation, with block_size and requests ({error!r})") from error


def _synthetic(choice: Random, sessions: int = 3000) -> Iterator[RawRequest]:
    """Requests of `sessions` sessions that start over an hour."""
    prompts = [choice.randrange(200, 6000) for _ in range(12)]  # tokens of each system prompt
    for session in range(sessions):
        at_s = choice.uniform(0, 3600)
        system = min(int(choice.paretovariate(0.8)) - 1, len(prompts) - 1)
        tokens = prompts[system] + int(choice.lognormvariate(8.2, 1.2))
        while True:
            tokens = min(tokens, 128 * 1024)
            shared = prompts[system] // _TOKENS
            blocks = [_block_name(system, session, i, shared, tokens) for i in range(-(-tokens // _TOKENS))]
            yield RawRequest(int(at_s * SECOND), tokens, 0, blocks, str(session))
            if choice.random() < 0.4:
                break
            at_s += choice.lognormvariate(5.0, 1.5)
            tokens += int(choice.lognormvariate(6.0, 1.2)) + int(choice.lognormvariate(5.0, 1.0))


def _block_name(system: int, session: int, index: int, shared: int, tokens: int) -> tuple[int, ...]:
    """Shared blocks are named by the system prompt; the last block is named by its length too, for it grows with the next turn."""
    if index < shared:
        return (system, index)
    whole = (index + 1) * _TOKENS <= tokens
    return (session, index, -1) if whole else (session, index, tokens)
