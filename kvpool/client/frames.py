"""Copying stored frames from node to node as they are, whatever their namespace: for nodes, which keep frames and don't read them.

A *batch* is at most `BATCH_BYTES` (or one frame that is larger), so that one window of bytes is in flight and a lease outlives it
without being renewed. Whoever calls paces the batches (`kvpool.policy.bucket`). Every frame is checked (header, key, checksum) in this
process before it is handed on: what was fetched before it is committed here, what is pushed before it leaves. With a frame travel
what is left of its ttl and priority, its tenant, its place in the chain.

    push    reserve there, fill and check a staging buffer, write, commit there
    fetch   acquire there with details, reserve here, read straight into the reserved places, check, commit here
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey, check_frame
from kvpool.client.background import outlast
from kvpool.client.leasing import MARGIN_MS, lease_ms
from kvpool.client.links import NodeLink
from kvpool.client.transfer import Stages, may_release
from kvpool.clock import seconds_left
from kvpool.errors import ConfigError, DeadlineError, FrameError, RemoteError, UnavailableError
from kvpool.request.pool import Outcome, Reservation, Stored
from kvpool.transport import Run, merge_runs
from kvpool.units import MIB

Bytes = npt.NDArray[np.uint8]

BATCH_BYTES = 8 * MIB
_CALL_S = 2.0


class Frame(NamedTuple):
    """A block to copy: its key, and what it takes to store it (the offset means nothing)."""

    key: BlockKey
    stored: Stored


Fill = Callable[[Sequence[tuple[Frame, Bytes]]], Sequence[bool]]
"""Puts each frame's bytes into its buffer, uint8 `[length]`; False for those it can't get. Called in a worker thread."""
Settle = Callable[[Sequence[Frame]], Awaitable[tuple[int, Sequence[int | None]]]]
"""Makes room here: (write lease, offset in the arena or None per frame)."""


@dataclass(slots=True)
class Pushed:
    """What became of a batch. `written` were sent and committed, `there` had been there already (or are being written by somebody),
    `unsound` were damaged here or are gone, `refused` found no room; the rest failed on the way."""

    written: list[Frame]
    there: list[Frame]
    unsound: list[Frame]
    refused: list[Frame]

    @property
    def nbytes(self) -> int:
        """Bytes sent."""
        return sum(frame.stored.length for frame in self.written)


def batches(frames: Sequence[Frame], nbytes: int = BATCH_BYTES) -> Iterator[list[Frame]]:
    """Cut into batches that can be reserved with one call: of one tenant and sequence, at most `nbytes` or one frame."""
    batch: list[Frame] = []
    filled = 0
    for frame in sorted(frames, key=lambda frame: (frame.stored.tenant, frame.stored.sequence)):  # stable: chains keep their order
        alike = not batch or _kind(batch[0]) == _kind(frame)
        if batch and (not alike or filled + frame.stored.length > nbytes):
            yield batch
            batch, filled = [], 0
        batch.append(frame)
        filled += frame.stored.length
    if batch:
        yield batch


async def push(
    link: NodeLink,
    batch: Sequence[Frame],
    fill: Fill,
    *,
    owner: str,
    stages: Stages,
    threads: Executor,
    deadline_ns: int,
    near: bool = False,
) -> Pushed:
    """Make a batch (as `batches` cuts them) present on the node of `link`. Raises what its calls and its reach raise."""
    result = Pushed([], [], [], [])
    tenant, sequence = _kind(batch[0])
    length_ms = lease_ms(sum(frame.stored.length for frame in batch), deadline_ns)
    blocks = [Reservation(f.key, f.stored.parent, f.stored.depth, f.stored.length, f.stored.ttl_ms, f.stored.priority, f.stored.priority_ms)
              for f in batch]  # fmt: skip
    lease_id, grants = await link.rpc.reserve(
        owner, length_ms, blocks, _patience_s(deadline_ns), sequence=sequence, tenant=tenant, near=near
    )
    granted: list[tuple[Frame, int]] = []
    for frame, (outcome, offset) in zip(batch, grants, strict=True):
        if outcome is Outcome.GRANTED:
            granted.append((frame, offset))
        else:
            (result.there if outcome is Outcome.EXISTS else result.refused).append(frame)
    if not granted:
        return result
    loop = asyncio.get_running_loop()
    settled = may_release(link)
    try:
        sound = await _finished(loop.run_in_executor(threads, _send, link, lease_id, granted, fill, stages, deadline_ns))
        settled = True
        result.unsound += [frame for (frame, _), ok in zip(granted, sound, strict=True) if not ok]
        sent = [frame for (frame, _), ok in zip(granted, sound, strict=True) if ok]
        done = await link.rpc.commit(lease_id, [frame.key for frame in sent], _patience_s(deadline_ns)) if sent else []
        result.written += [frame for frame, ok in zip(sent, done, strict=True) if ok]
    finally:
        if settled and len(result.written) < len(granted):
            await _release(link, lease_id, ())
    return result


async def fetch(
    link: NodeLink, keys: Sequence[BlockKey], settle: Settle, arena: Bytes, *, owner: str, threads: Executor, deadline_ns: int
) -> tuple[int, list[Frame]]:
    """Read what the node of `link` has of `keys` into `arena`, at the offsets that `settle` gives: (write lease here, the sound frames).

    Publishing is the caller's. Raises what the calls and the reach raise.
    """
    length_ms = int(1000 * seconds_left(deadline_ns)) + MARGIN_MS
    lease_id, blocks = await link.rpc.acquire_stored(owner, length_ms, keys, _patience_s(deadline_ns))
    found = [Frame(key, block) for key, block in zip(keys, blocks, strict=True) if block is not None]
    if not found:
        return 0, []
    suspect: list[BlockKey] = []
    try:
        here, offsets = await settle(found)
        placed = [(frame, offset) for frame, offset in zip(found, offsets, strict=True) if offset is not None]
        runs = [Run(frame.stored.offset, frame.stored.length, offset) for frame, offset in placed]
        loop = asyncio.get_running_loop()
        sound = await _finished(loop.run_in_executor(threads, _receive, link, lease_id, placed, runs, arena, deadline_ns))
        suspect = [frame.key for (frame, _), ok in zip(placed, sound, strict=True) if not ok]
    finally:
        await _release(link, lease_id, suspect)
    return here, [frame for (frame, _), ok in zip(placed, sound, strict=True) if ok]


def _send(link: NodeLink, lease_id: int, granted: Sequence[tuple[Frame, int]], fill: Fill, stages: Stages, deadline_ns: int) -> list[bool]:
    with stages.take() as stage:
        total = sum(frame.stored.length for frame, _ in granted)
        buffer = stage if total <= stage.size else np.empty(total, np.uint8)
        at, spots = 0, list[tuple[Frame, Bytes]]()
        runs: list[Run] = []
        for frame, offset in granted:
            length = frame.stored.length
            spots.append((frame, buffer[at : at + length]))
            runs.append(Run(offset, length, at))
            at += length
        sound = [ok and _sound(data, frame.key) for (frame, data), ok in zip(spots, fill(spots), strict=True)]
        good = merge_runs(run for run, ok in zip(runs, sound, strict=True) if ok)
        if good:
            with _lease_may_end():
                link.reach.write(good, buffer, lease_id=lease_id, deadline_ns=deadline_ns)
    return sound


def _receive(
    link: NodeLink, lease_id: int, placed: Sequence[tuple[Frame, int]], runs: Sequence[Run], arena: Bytes, deadline_ns: int
) -> list[bool]:
    if runs:
        with _lease_may_end():
            link.reach.read(merge_runs(runs), arena, lease_id=lease_id, deadline_ns=deadline_ns)
    return [_sound(arena[offset : offset + frame.stored.length], frame.key) for frame, offset in placed]


@contextmanager
def _lease_may_end() -> Iterator[None]:
    """A node that moves bytes itself refuses to under a lease that has ended: this process stood still for longer than that."""
    try:
        yield
    except ConfigError as error:
        raise UnavailableError(f"the lease ended before the bytes had moved: {error}") from error


async def _finished(work: "asyncio.Future[list[bool]]") -> list[bool]:
    """What a worker thread answers. It moves bytes of leased places, so even who is cancelled waits for its end (it has a deadline)."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await outlast(work)
        raise


async def _release(link: NodeLink, lease_id: int, suspect: Sequence[BlockKey]) -> None:
    try:
        await link.rpc.release(lease_id, suspect, _CALL_S)
    except RemoteError:
        return  # it runs out by itself


def _patience_s(deadline_ns: int) -> float:
    left_s = seconds_left(deadline_ns)
    if not left_s:
        raise DeadlineError("the deadline passed before the blocks were copied")
    return min(_CALL_S, left_s)


def _kind(frame: Frame) -> tuple[str, int]:
    return frame.stored.tenant, frame.stored.sequence


def _sound(data: Bytes, key: BlockKey) -> bool:
    try:
        check_frame(data, key)
    except FrameError:
        return False
    return True
