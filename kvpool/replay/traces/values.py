"""A request of a trace, whatever the file it comes from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool.errors import ConfigError


class TraceRequest(NamedTuple):
    """One request: its arrival in nanoseconds from the start of the trace, and its lengths in tokens.

    `blocks`: the prompt's blocks from the head on, numbered through the whole trace from 0; equal numbers mean that the block and
    everything before it are equal. The last one may be partial, and tokens behind the last named block are nobody else's.
    `session` names a conversation, `turn` (from 1) this request's place in it; `tenant` and `kind` are labels. "" and 0: not known.
    """

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    session: str = ""
    turn: int = 0
    tenant: str = ""
    kind: str = ""


class RawRequest(NamedTuple):
    """A request as a reader finds it: `ids` are its blocks by whatever name the file gives them, chained or not."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    ids: Sequence[object] = ()
    session: str = ""
    turn: int = 0
    tenant: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival, the first at 0. `block_tokens` 0: the file doesn't say who shares what.

    `unique`: how many different blocks there are. `lost`: requests that the recorder says it could not keep.
    """

    name: str
    format: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]
    unique: int
    lost: int = 0

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at_ns / 1e9

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens in blocks that an earlier request had too: what a cache that forgets nothing would hit."""
        seen: set[int] = set()
        shared = 0
        for request in self.requests:
            known = next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
            shared += min(known * self.block_tokens, request.prompt_tokens)
            seen.update(request.blocks)
        return shared


def make_trace(name: str, format: str, block_tokens: int, raws: Iterable[RawRequest], lost: int = 0) -> Trace:
    """Sort by time (equal times as they came), begin at 0, number the blocks along their chains. Raises `ConfigError` for no requests."""
    ordered = sorted(raws, key=lambda raw: raw.at_ns)
    if not ordered:
        raise ConfigError(f"trace {name} has no requests")
    start_ns = ordered[0].at_ns
    numbers: dict[tuple[int, object], int] = {}
    requests = []
    for raw in ordered:
        blocks: list[int] = []
        parent = -1
        for id in raw.ids:
            parent = numbers.setdefault((parent, id), len(numbers))
            blocks.append(parent)
        requests.append(TraceRequest(raw.at_ns - start_ns, raw.prompt_tokens, raw.output_tokens, tuple(blocks), *raw[4:]))
    return Trace(name=name, format=format, block_tokens=block_tokens, requests=tuple(requests), unique=len(numbers), lost=lost)
