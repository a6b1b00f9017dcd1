"""Moving blocks between nodes and a caller's memory: the blocking half of the client, run in worker threads.

Bytes are staged: a window of frames is copied into a reused buffer, each frame is validated there (header, key, checksum), and
only then handed on. So whatever a dying node, an expired lease or a zombie writer does to the arena, the caller sees a whole
right block or none.

A place that fails ends nothing but itself: a reader learns how far it got and under which lease it went wrong, so that the rest can be read
elsewhere; a writer goes on with the other copies.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey
from kvpool.block.frame import Framer
from kvpool.client.links import NodeLink
from kvpool.client.plan import Piece, Window, windows
from kvpool.errors import ClosedError, ConfigError, DeadlineError, FrameError, KvpoolError, RemoteError
from kvpool.transport import Reach, Run
from kvpool.units import MIB, SECOND

log = logging.getLogger(__name__)

Payload = npt.NDArray[np.uint8]
Touch = Callable[[int, Payload], None]
"""Called with a block's index in its chain and its payload, to take it (a sink) or to write it (a fill)."""
WINDOW_BYTES = 8 * MIB
SLOWEST_BYTES_PER_S = 20_000_000
"""A slow link: what leases are sized by, and what is waited for where there is a choice."""
STALL_NS = SECOND // 2
"""How much longer than a slow link a node may take where there is a choice."""


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


@dataclass(frozen=True, slots=True)
class Lease:
    """What a node granted: room to write, or blocks that stay while they are read."""

    link: NodeLink
    id: int


def may_release(link: NodeLink) -> bool:
    """Whether a write lease of `link` may be released after a write under it has failed: no byte of it can arrive later.

    A copy in memory has ended when its call has, and bytes by gRPC are refused once the lease is gone. Over a network they may be on the
    way still, and a release says that the last one has been written.
    """
    return link.reach.name in ("shm", "grpc", "memory")


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One batch of blocks under way between a caller's memory and the places that `leases` cover, which `pieces` name by number.

    `pieces` are in the order of the chain; `counts` gives each block's tokens by its index in `chain`. The bytes of a lease in
    `hurried` are wanted from this node only as long as it is quick: there is another one. With `apart` the blocks are no chain: none
    follows another, and one that can't be had ends nothing.
    """

    leases: Sequence[Lease]
    pieces: Sequence[Piece]
    chain: Sequence[BlockKey]
    counts: Mapping[int, int]
    deadline_ns: int
    hurried: Collection[int] = ()
    apart: bool = False
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set it to end the transfer between two windows."""
    lost: set[int] = field(default_factory=set)
    """Leases that ended before the transfer did: put them here to have them left alone between two windows."""
    failed: dict[int, KvpoolError] = field(default_factory=dict)
    """Leases under which no bytes moved any more, and why."""
    late: set[int] = field(default_factory=set)
    """Leases whose bytes had too little time to move, less than over a slow link: nobody's failure."""
    used: set[int] = field(default_factory=set)
    """Leases under which bytes have moved."""
    done: int = 0
    """Blocks delivered or written so far, whether or not there were failures after."""
    delivered: list[int] = field(default_factory=list)
    """Indices of the blocks that were read and handed on."""
    written: dict[int, list[int]] = field(default_factory=dict)
    """Indices of the blocks that were written whole, by lease."""
    suspect: dict[int, list[int]] = field(default_factory=dict)
    """Indices of blocks whose bytes failed validation, by lease."""

    def settled(self, number: int) -> bool:
        """Whether nothing is written under a lease any more, so that it may be released; else it has to run out, and is fenced."""
        return not (number in self.failed or number in self.late) or may_release(self.leases[number].link)

    def read(self, framer: Framer, stages: Stages, sink: Touch) -> None:
        """Read the pieces and sink each validated payload, up to the first that can't be had from where it should be."""
        for window, buffer in self._windows(stages):
            moved = set[int]()
            for number, runs in window.runs.items():
                if self._move(number, runs, buffer, lambda reach: reach.read):
                    moved.add(number)
                elif not self.apart:
                    break
            for (index, at, length), (number,) in zip(window.spots, window.leases, strict=True):
                payload = _open(framer, buffer[at : at + length], self.chain[index], self.counts[index]) if number in moved else None
                if payload is not None:
                    sink(index, payload)
                    self.done += 1
                    self.delivered.append(index)
                    continue
                if number in moved:
                    self.suspect.setdefault(number, []).append(index)
                if not self.apart:
                    return

    def write(self, framer: Framer, stages: Stages, fill: Touch) -> None:
        """Fill, stamp and write the pieces, each to all of its places; a place that fails stops none of the others."""
        for window, buffer in self._windows(stages):
            usable = {number for number in window.runs if self._usable(number)}
            wanted = [usable.intersection(numbers) for numbers in window.leases]
            for (index, at, length), numbers in zip(window.spots, wanted, strict=True):
                if numbers:
                    frame = buffer[at : at + length]
                    fill(index, frame[framer.header_bytes :])
                    parent = self.chain[index - 1] if index and not self.apart else framer.root
                    framer.stamp(frame, self.chain[index], parent, self.counts[index])
            moved = {number for number in usable if self._move(number, window.runs[number], buffer, lambda reach: reach.write)}
            for (index, _, _), numbers in zip(window.spots, wanted, strict=True):
                for number in numbers & moved:
                    self.written.setdefault(number, []).append(index)
                self.done += bool(numbers & moved)

    def _windows(self, stages: Stages) -> Iterator[tuple[Window, Payload]]:
        """The windows still wanted, each with a staging buffer to use until the next. Too late is nobody's fault: it just ends."""
        with stages.take() as buffer:
            for window in windows(self.pieces, stages.nbytes):
                if self.stopped.is_set() or time.monotonic_ns() >= self.deadline_ns:
                    return
                yield window, buffer

    def _usable(self, number: int) -> bool:
        return not (number in self.failed or number in self.lost or number in self.late)

    def _move(self, number: int, runs: Sequence[Run], buffer: Payload, way: Callable[[Reach], Callable[..., None]]) -> bool:
        """Whether the bytes of `runs` have moved under lease `number`."""
        lease, deadline_ns = self.leases[number], self.deadline_ns
        if not self._usable(number):
            return False
        fair_ns = time.monotonic_ns() + STALL_NS + sum(run.length for run in runs) * SECOND // SLOWEST_BYTES_PER_S
        if number in self.hurried and lease.link.reach.name != "shm":
            deadline_ns = min(deadline_ns, fair_ns)
        try:
            way(lease.link.reach)(runs, buffer, lease_id=lease.id, deadline_ns=deadline_ns)
        except ConfigError as error:  # the node doesn't know the lease any more, or it never covered these places
            log.warning("lease %d on node %s is of no use: %s", lease.id, lease.link.node.node_id[:8], error)
            self.lost.add(number)
            return False
        except (RemoteError, ClosedError) as error:
            if isinstance(error, DeadlineError) and lease.link.reach.name == "shm":
                self.stopped.set()  # a copy in memory was late because this host is busy: the node has no part in it
            elif isinstance(error, DeadlineError) and deadline_ns < fair_ns:
                self.late.add(number)
            else:
                self.failed[number] = error
            return False
        self.used.add(number)
        return True


def _open(framer: Framer, frame: Payload, key: BlockKey, n_tokens: int) -> Payload | None:
    """The frame's payload, or None when it isn't exactly the wanted block."""
    try:
        view = framer.open(frame, key)
    except FrameError:
        return None
    return view.payload if view.n_tokens == n_tokens else None
