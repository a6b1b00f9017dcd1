"""The client's end: `Reach` over TCP, and frames by their keys without a lease.

`get` needs no lease because the server holds what it sends: it finds the frames on the node's board, keeps their bytes in place while they
go out, and says of each key whether it came. What came is looked at by
the caller's own check, while it is hot; otherwise it is unchecked, like everything a reach delivers.
"""

import time
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.transport.reach import Bytes, Run, check_deadline, check_runs
from kvpool.transport.tcp import wire
from kvpool.transport.tcp.line import Check, Line, Peer, Want
from kvpool.transport.tcp.lines import Lines
from kvpool.units import SECOND

CONNECTIONS: Final = 2
_VERIFY_NS: Final = 5 * SECOND


def _unchecked(position: int) -> bool:
    """Whatever came is good: for those who look at it themselves."""
    return True


class TcpReach:
    """`Reach` to the node `peer` by at most `connections` connections.

    The first is opened before the constructor returns, by `deadline_ns` (default: 5 s from now), so a reach that exists has been let in.
    Raises `UnavailableError` (nobody there, or not this node in this life), `AccessError`, `LimitError`, `ProtocolError`, `DeadlineError`.
    """

    name = "tcp"

    def __init__(self, peer: Peer, *, connections: int = CONNECTIONS, deadline_ns: int | None = None) -> None:
        self._lines = Lines(lambda until: Line(peer, until), connections)
        self._finish = weakref.finalize(self, self._lines.close)
        with self._lines.line(time.monotonic_ns() + _VERIFY_NS if deadline_ns is None else deadline_ns) as line:
            self._arena_bytes = line.arena_bytes

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.read`; `lease_id` is not used."""
        self._lines.require_open()
        check_runs(runs, self._arena_bytes, into, writable=True)
        check_deadline(deadline_ns)
        if any(run.length for run in runs):
            with self._lines.line(deadline_ns) as line:
                for batch in wire.batches(runs):
                    line.read(batch, into, deadline_ns)

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.write`; `lease_id` is not used. After an error bytes may still arrive at the node for a moment."""
        self._lines.require_open()
        check_runs(runs, self._arena_bytes, source, writable=False)
        check_deadline(deadline_ns)
        if any(run.length for run in runs):
            with self._lines.line(deadline_ns) as line:
                for batch in wire.batches(runs):
                    line.write(batch, source, deadline_ns)

    def probe(self, keys: Sequence[BlockKey], deadline_ns: int) -> bytes:
        """One byte a key: 1 where the frame can be had by `get` now. Raises as `Reach.read`."""
        self._lines.require_open()
        check_deadline(deadline_ns)
        found = b""
        if keys:
            with self._lines.line(deadline_ns) as line:
                for start in range(0, len(keys), wire.MAX_COUNT):
                    found += line.probe(keys[start : start + wire.MAX_COUNT], deadline_ns)
        return found

    def get(self, wants: Sequence[Want], deadline_ns: int, check: Check = _unchecked) -> list[bool]:
        """Fill the targets of the frames that are there; whether each came and passed `check`. Raises as `Reach.read`.

        A want is (key, frame length in bytes, header target, payload target): contiguous writable uint8 arrays whose sizes add up to the
        length. A frame of another length isn't there. After an exception, and where False, the targets' bytes are unspecified. `check` is
        called with the position of each want whose frame has come, soon after it has, and must take no longer than looking at its bytes.
        """
        self._lines.require_open()
        _check_wants(wants)
        check_deadline(deadline_ns)
        came: list[bool] = []
        if wants:
            with self._lines.line(deadline_ns) as line:
                for start, batch in _batches(wants):
                    came += line.get(batch, deadline_ns, check if not start else partial(_shifted, check, start))
        return came

    def close(self) -> None:
        """End calls under way in other threads with `ClosedError` and hang up; twice is fine."""
        self._finish()


def _check_wants(wants: Sequence[Want]) -> None:
    for _, length, header, payload in wants:
        for target in (header, payload):
            flags = target.flags
            if target.dtype.char != "B" or target.ndim != 1 or not flags.c_contiguous or not flags.writeable:
                raise ConfigError("targets are contiguous, writable 1-D arrays of uint8")
        if header.size + payload.size != length:
            raise ConfigError(f"targets of {header.size} and {payload.size} bytes for a frame of {length}")


def _shifted(check: Check, start: int, position: int) -> bool:
    return check(start + position)


def _batches(wants: Sequence[Want]) -> Iterator[tuple[int, Sequence[Want]]]:
    """Where each begins, as requests: at most `MAX_COUNT` frames each, and `BATCH_BYTES` unless a single one is larger."""
    start, nbytes = 0, 0
    for index, want in enumerate(wants):
        if index > start and (index - start == wire.MAX_COUNT or nbytes + want[1] > wire.BATCH_BYTES):
            yield start, wants[start:index]
            start, nbytes = index, 0
        nbytes += want[1]
    yield start, wants[start:]
