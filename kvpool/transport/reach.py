"""What every way of moving bytes promises, and the checks they share.

Theory. A `Reach` joins one client to one node's arena. Its calls block, are safe from many threads, release the GIL while bytes move, and
end by their deadline: bytes there, or one of two exceptions. Nothing it delivers is trusted: the reader checks the frame (header, key,
checksum) afterwards, whatever the reach, so a reach needs no checks of content, only of bounds; those it makes before any byte moves.
"""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError, DeadlineError

Bytes = npt.NDArray[np.uint8]


class Run(NamedTuple):
    """`length` bytes at `offset` of the arena's data region, at position `at` of the caller's buffer."""

    offset: int
    length: int
    at: int


class Reach(Protocol):
    """Bytes between this process and one node's arena.

    `into` and `source` are contiguous 1-D uint8 arrays. `lease_id` is the lease the ranges are held under (only reaches that ask the node
    need it). `deadline_ns` is monotonic (`time.monotonic_ns`). Every call raises `ConfigError` for a run outside the arena or the buffer
    before any byte moves, `ClosedError` after `close`, `DeadlineError`, or `UnavailableError`. After an exception the bytes of
    `into` (or of the arena's ranges) are unspecified, but nothing writes to `into` any more.
    """

    @property
    def name(self) -> str:
        """`shm`, `ucx`, `tcp`, `grpc` or `memory`."""
        ...

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """Copy each run from the arena into `into[at:at+length]`."""
        ...

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """Copy each run from `source[at:at+length]` to the arena; on return the bytes are in the arena."""
        ...

    def close(self) -> None:
        """Let go of the node; twice is fine."""
        ...


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """`runs` in their order, without the empty ones, neighbours that adjoin both in the arena and in the buffer made one."""
    merged: list[Run] = []
    for run in runs:
        if run.length == 0:
            continue
        last = merged[-1] if merged else None
        if last is not None and last.offset + last.length == run.offset and last.at + last.length == run.at:
            merged[-1] = Run(last.offset, last.length + run.length, last.at)
        else:
            merged.append(run)
    return tuple(merged)


def check_runs(runs: Sequence[Run], arena_bytes: int, buffer: Bytes, *, writable: bool) -> None:
    """Raise `ConfigError` unless every run lies in the arena and in `buffer`, a contiguous 1-D uint8 array (writable if it must be)."""
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise ConfigError("the buffer must be a contiguous 1-D array of uint8: pass np.ascontiguousarray(x).view(np.uint8).reshape(-1)")
    if writable and not buffer.flags.writeable:
        raise ConfigError("the buffer to read into is read-only")
    for offset, length, at in runs:
        if length < 0 or offset < 0 or offset + length > arena_bytes:
            raise ConfigError(f"run {offset}+{length} is outside an arena of {arena_bytes} bytes")
        if at < 0 or at + length > buffer.size:
            raise ConfigError(f"run at {at}+{length} is outside a buffer of {buffer.size} bytes")


def check_deadline(deadline_ns: int) -> None:
    """Raise `DeadlineError` once `deadline_ns` has passed."""
    if time.monotonic_ns() >= deadline_ns:
        raise DeadlineError("the deadline passed before the bytes had moved")
