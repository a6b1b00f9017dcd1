"""Moving blocks between nodes and a caller's memory: the blocking half of the client, run in worker threads.

Bytes are staged: a window of frames is copied into a reused buffer, each frame is validated there (header, key, checksum), and
only then handed on. So whatever a dying node, an expired lease or a zombie writer does to the arena, the caller sees a whole
right block or none.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey
from kvpool.block.frame import Framer
from kvpool.client.links import NodeLink
from kvpool.client.plan import windows
from kvpool.errors import FrameError
from kvpool.units import MIB

Payload = npt.NDArray[np.uint8]
Piece = tuple[int, str, int, int]
"""(index in the chain, node id, arena offset, frame length)."""

WINDOW_BYTES = 8 * MIB


class Stages:
    """Reusable staging buffers, each big enough for a window; at most `keep` are kept when idle."""

    def __init__(self, frame_bytes: int, *, keep: int = 4) -> None:
        self.nbytes = max(WINDOW_BYTES, frame_bytes)
        self._keep = keep
        self._idle: list[Payload] = []
        self._lock = threading.Lock()

    @contextmanager
    def take(self) -> Iterator[Payload]:
        """A buffer for the time of the `with` block."""
        with self._lock:
            buffer = self._idle.pop() if self._idle else None
        if buffer is None:
            buffer = np.zeros(self.nbytes, np.uint8)
        try:
            yield buffer
        finally:
            with self._lock:
                if len(self._idle) < self._keep:
                    self._idle.append(buffer)


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One batch under way: its links and leases by node id, its deadline, a switch to stop it between windows."""

    links: Mapping[str, NodeLink]
    leases: Mapping[str, int]
    deadline_ns: int
    stopped: threading.Event = field(default_factory=threading.Event)
    done: int = 0
    """Blocks delivered or written so far; it stays true when the transfer raises."""
    suspect: dict[str, list[BlockKey]] = field(default_factory=dict)
    """Keys per node whose bytes failed validation."""
    busy_on: str | None = None
    """The node whose reach is being used: the one that failed, when the transfer raised."""


def read_frames(
    transfer: Transfer,
    pieces: Sequence[Piece],
    chain: Sequence[BlockKey],
    counts: Mapping[int, int],
    framer: Framer,
    stages: Stages,
    sink: Callable[[int, Payload], None],
) -> None:
    """Read `pieces` in order and sink each validated payload, until the first that fails validation. Raises what the reach raises."""
    with stages.take() as buffer:
        for window in windows(pieces, stages.nbytes):
            if transfer.stopped.is_set():
                return
            for node_id, runs in window.runs.items():
                transfer.busy_on = node_id
                reach = transfer.links[node_id].reach
                reach.read(runs, buffer, lease_id=transfer.leases[node_id], deadline_ns=transfer.deadline_ns)
            transfer.busy_on = None
            for (index, at, length), node_id in zip(window.spots, window.nodes, strict=True):
                payload = _open(framer, buffer[at : at + length], chain[index], counts[index])
                if payload is None:
                    transfer.suspect.setdefault(node_id, []).append(chain[index])
                    return
                sink(index, payload)
                transfer.done += 1


def write_frames(
    transfer: Transfer,
    pieces: Sequence[Piece],
    chain: Sequence[BlockKey],
    counts: Mapping[int, int],
    framer: Framer,
    stages: Stages,
    fill: Callable[[int, Payload], None],
) -> None:
    """Fill, stamp and write `pieces` in order. Raises what the reach raises."""
    with stages.take() as buffer:
        for window in windows(pieces, stages.nbytes):
            if transfer.stopped.is_set():
                return
            for index, at, length in window.spots:
                frame = buffer[at : at + length]
                fill(index, frame[framer.header_bytes :])
                framer.stamp(frame, chain[index], chain[index - 1] if index else framer.root, counts[index])
            for node_id, runs in window.runs.items():
                transfer.busy_on = node_id
                reach = transfer.links[node_id].reach
                reach.write(runs, buffer, lease_id=transfer.leases[node_id], deadline_ns=transfer.deadline_ns)
            transfer.busy_on = None
            transfer.done += len(window.spots)


def _open(framer: Framer, frame: Payload, key: BlockKey, n_tokens: int) -> Payload | None:
    """The frame's payload, or None when it isn't exactly the wanted block."""
    try:
        view = framer.open(frame, key)
    except FrameError:
        return None
    return view.payload if view.n_tokens == n_tokens else None
