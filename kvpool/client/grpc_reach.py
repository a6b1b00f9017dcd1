"""The reach of last resort: leased ranges as a stream over the control plane. No UCX, no shared host needed."""

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpool.errors import ClosedError, ConfigError, DeadlineError
from kvpool.transport import Run
from kvpool.units import SECOND
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_data import PoolData

Bytes = npt.NDArray[np.uint8]


class GrpcReach:
    """`Reach` to `node` over `PoolData`. `length` is the size of the arena's data region in bytes."""

    name = "grpc"

    def __init__(self, address: str, node: NodeIdentity, length: int) -> None:
        self._data = PoolData(address, node)
        self._length = length
        self._closed = False
        self._lock = threading.Lock()

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """Fill `into` from the arena, run by run."""
        parts = self._parts(runs, into)
        timeout_s = self._remaining_s(deadline_ns)
        if parts:
            self._data.read(lease_id, parts, timeout_s)

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """Put `source` into the arena, run by run."""
        parts = self._parts(runs, source)
        timeout_s = self._remaining_s(deadline_ns)
        if parts:
            self._data.write(lease_id, parts, timeout_s)

    def close(self) -> None:
        """Disconnect; calls in flight end with `UnavailableError`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._data.close()

    def _parts(self, runs: Sequence[Run], buffer: Bytes) -> list[tuple[int, Bytes]]:
        if self._closed:
            raise ClosedError("this reach was closed")
        for run in runs:
            if run.offset < 0 or run.length < 0 or run.offset + run.length > self._length:
                raise ConfigError(f"run {run} leaves the arena of {self._length} bytes")
            if run.at < 0 or run.at + run.length > buffer.nbytes:
                raise ConfigError(f"run {run} leaves the buffer of {buffer.nbytes} bytes")
        return [(run.offset, buffer[run.at : run.at + run.length]) for run in runs if run.length]

    def _remaining_s(self, deadline_ns: int) -> float:
        remaining_ns = deadline_ns - time.monotonic_ns()
        if remaining_ns <= 0:
            raise DeadlineError("the deadline had passed before the transfer began")
        return remaining_ns / SECOND
