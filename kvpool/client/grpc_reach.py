"""The reach of last resort: leased ranges as a stream over the control plane. No UCX, no shared host needed."""

import threading
from collections.abc import Sequence

from kvpool.clock import seconds_left
from kvpool.errors import ClosedError
from kvpool.transport import Run
from kvpool.transport.reach import Bytes, check_deadline, check_runs
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_data import PoolData


class GrpcReach:
    """`Reach` to `node` over `PoolData`. `length` is the size of the arena's data region in bytes."""

    name = "grpc"

    def __init__(self, address: str, node: NodeIdentity, length: int, security: Security = PLAIN) -> None:
        self._data = PoolData(address, node, security)
        self._length = length
        self._closed = False
        self._lock = threading.Lock()

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """Fill `into` from the arena, run by run."""
        parts = self._parts(runs, into, deadline_ns, writable=True)
        if parts:
            self._data.read(lease_id, parts, seconds_left(deadline_ns))

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """Put `source` into the arena, run by run."""
        parts = self._parts(runs, source, deadline_ns, writable=False)
        if parts:
            self._data.write(lease_id, parts, seconds_left(deadline_ns))

    def close(self) -> None:
        """Disconnect; calls in flight end with `UnavailableError`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._data.close()

    def _parts(self, runs: Sequence[Run], buffer: Bytes, deadline_ns: int, *, writable: bool) -> list[tuple[int, Bytes]]:
        if self._closed:
            raise ClosedError("this reach is closed; open another one")
        check_runs(runs, self._length, buffer, writable=writable)
        check_deadline(deadline_ns)
        return [(run.offset, buffer[run.at : run.at + run.length]) for run in runs if run.length]
