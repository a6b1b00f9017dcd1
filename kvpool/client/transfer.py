"""Moving blocks between nodes and a caller's memory: the blocking half of the client, run in worker threads.

Bytes are staged: a window of frames is copied into a reused buffer, each frame is validated there (header, key, checksum), and
only then handed on. So whatever a dying node, an expired lease or a zombie writer does to the arena, the caller sees a whole
right block or none.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey
from kvpool.block.frame import Framer
from kvpool.client.links import NodeLink
from kvpool.client.plan import Window, windows
from kvpool.errors import FrameError
from kvpool.transport import Reach
from kvpool.units import MIB

Payload = npt.NDArray[np.uint8]
Touch = Callable[[int, Payload], None]
"""Called with a block's index in its chain and its payload, to take it (a sink) or to write it (a fill)."""
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
    """One batch of blocks under way between a caller's memory and the nodes that `links` (by node id) lead to.

    `pieces` are in the order of the chain; `counts` gives each block's tokens by its index in `chain`.
    """

    links: Mapping[str, NodeLink]
    leases: Mapping[str, int]
    pieces: Sequence[Piece]
    chain: Sequence[BlockKey]
    counts: Mapping[int, int]
    deadline_ns: int
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set it to end the transfer between two windows."""
    done: int = 0
    """Blocks delivered or written so far; it stays true when the transfer raises."""
    suspect: dict[str, list[BlockKey]] = field(default_factory=dict)
    """Keys per node whose bytes failed validation."""
    busy_on: str | None = None
    """The node whose reach is being used: the one that failed, when the transfer raised."""

    def read(self, framer: Framer, stages: Stages, sink: Touch) -> None:
        """Read the pieces and sink each validated payload, until the first that fails validation. Raises what a reach raises."""
        for window, buffer in self._windows(stages):
            self._move(window, lambda reach: reach.read, buffer)
            for (index, at, length), node_id in zip(window.spots, window.nodes, strict=True):
                payload = _open(framer, buffer[at : at + length], self.chain[index], self.counts[index])
                if payload is None:
                    self.suspect.setdefault(node_id, []).append(self.chain[index])
                    return
                sink(index, payload)
                self.done += 1

    def write(self, framer: Framer, stages: Stages, fill: Touch) -> None:
        """Fill, stamp and write the pieces. Raises what a reach raises."""
        for window, buffer in self._windows(stages):
            for index, at, length in window.spots:
                frame = buffer[at : at + length]
                fill(index, frame[framer.header_bytes :])
                framer.stamp(frame, self.chain[index], self.chain[index - 1] if index else framer.root, self.counts[index])
            self._move(window, lambda reach: reach.write, buffer)
            self.done += len(window.spots)

    def _windows(self, stages: Stages) -> Iterator[tuple[Window, Payload]]:
        """The windows still wanted, each with a staging buffer to use until the next. Too late is nobody's fault: it just ends."""
        with stages.take() as buffer:
            for window in windows(self.pieces, stages.nbytes):
                if self.stopped.is_set() or time.monotonic_ns() >= self.deadline_ns:
                    return
                yield window, buffer

    def _move(self, window: Window, way: Callable[[Reach], Callable[..., None]], buffer: Payload) -> None:
        for node_id, runs in window.runs.items():
            self.busy_on = node_id
            way(self.links[node_id].reach)(runs, buffer, lease_id=self.leases[node_id], deadline_ns=self.deadline_ns)
        self.busy_on = None


def _open(framer: Framer, frame: Payload, key: BlockKey, n_tokens: int) -> Payload | None:
    """The frame's payload, or None when it isn't exactly the wanted block."""
    try:
        view = framer.open(frame, key)
    except FrameError:
        return None
    return view.payload if view.n_tokens == n_tokens else None
