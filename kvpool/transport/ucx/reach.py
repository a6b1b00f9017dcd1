"""The client's end: `Reach` over one wire, safe from many threads.

    open ──a transfer fails, or misses its deadline on the way──▶ dead ──▶ UnavailableError from then on
      └──close()──▶ closed ──▶ ClosedError from then on

One transfer at a time: they share one wire anyway. A deadline that passes while waiting for the turn harms nobody; one that passes with
bytes on the way costs the wire (see `wire.py`) and the client opens another reach.

Each reach has a UCX context of its own (a few milliseconds), so nothing one connection suffers reaches another. An unclosed reach is taken
apart when it is collected and at exit; then nobody can be inside, or else it is left alone.
"""

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvpool.clock import seconds_left
from kvpool.errors import ClosedError, DeadlineError, UnavailableError
from kvpool.transport.offer import UcxOffer
from kvpool.transport.reach import Bytes, Run, check_deadline, check_runs
from kvpool.transport.ucx.lane import is_one_sided
from kvpool.transport.ucx.session import UcxSettings
from kvpool.transport.ucx.wire import Wire
from kvpool.units import SECOND

_log = logging.getLogger(__name__)

_VERIFY_NS: Final = 5 * SECOND
_CLOSE_S: Final = 5.0


class UcxReach:
    """`Reach` to the arena of `offer`.

    `verify` reads one byte before the constructor returns, by `deadline_ns` (default: 5 s from now), so that a reach that exists has been
    seen to work; then `transports` says what UCX sends over, such as `tcp/eth0` or `rc_mlx5/mlx5_0:1` (empty where it can't tell), and what
    the hardware serves by itself is used as such (`one_sided`). Raises `ConfigError` (no usable UCX here), `UnavailableError`,
    `DeadlineError`.
    """

    name = "ucx"

    def __init__(
        self, offer: UcxOffer, *, verify: bool = True, deadline_ns: int | None = None, settings: UcxSettings | None = None
    ) -> None:
        self._length = offer.length
        self.transports: tuple[str, ...] = ()
        self.one_sided = False
        self._line = _Line(Wire(offer, settings or UcxSettings.from_environment()))
        self._finish = weakref.finalize(self, self._line.close)
        if verify:
            try:
                until = time.monotonic_ns() + _VERIFY_NS if deadline_ns is None else deadline_ns
                self.read([Run(0, 1, 0)], np.zeros(1, np.uint8), lease_id=0, deadline_ns=until)
                self.transports = self._line.look()
                self.one_sided = is_one_sided(self.transports)
            except BaseException:
                self.close()
                raise

    def read(self, runs: Sequence[Run], into: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.read`; `lease_id` is not used."""
        check_runs(runs, self._length, into, writable=True)
        self._line.transfer(runs, into, put=False, deadline_ns=deadline_ns)

    def write(self, runs: Sequence[Run], source: Bytes, *, lease_id: int, deadline_ns: int) -> None:
        """See `Reach.write`; `lease_id` is not used. After an error bytes may still arrive at the node for a moment."""
        check_runs(runs, self._length, source, writable=False)
        self._line.transfer(runs, source, put=True, deadline_ns=deadline_ns)

    def close(self) -> None:
        """End transfers under way in other threads with `ClosedError` and let go of the node; twice is fine."""
        self._finish()


class _Line:
    """The wire with its lock and its state; knows nothing of the `UcxReach`, so that the latter can be collected."""

    def __init__(self, wire: Wire) -> None:
        self._wire: Wire | None = wire
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._closing = False
        self._dead = ""

    def transfer(self, runs: Sequence[Run], buffer: Bytes, *, put: bool, deadline_ns: int) -> None:
        self._stop()
        check_deadline(deadline_ns)
        if not self._lock.acquire(timeout=seconds_left(deadline_ns)):
            raise DeadlineError("the deadline passed while other transfers to this node were under way")
        try:
            self._stop()
            check_deadline(deadline_ns)
            self._move(runs, buffer, put, deadline_ns)
        finally:
            self._lock.release()

    def look(self) -> tuple[str, ...]:
        with self._lock:
            return self._wire.look() if self._wire is not None else ()

    def close(self) -> None:
        self._closing = True
        if os.getpid() != self._process:
            return
        if not self._lock.acquire(timeout=_CLOSE_S):
            _log.error("a UCX transfer did not end in %.0f s; its wire stays open", _CLOSE_S)
            return
        try:
            self._drop(None)
        finally:
            self._lock.release()

    def _move(self, runs: Sequence[Run], buffer: Bytes, put: bool, deadline_ns: int) -> None:
        wire = self._wire
        if wire is None:
            raise UnavailableError(f"the connection to the node is dead: {self._dead}")
        try:
            wire.move(runs, buffer, put=put, deadline_ns=deadline_ns, stop=self._stop)
        except BaseException as error:
            self._dead = str(error) or type(error).__name__
            self._drop(buffer)
            raise

    def _stop(self) -> None:
        if self._closing:
            raise ClosedError("this reach is closed; open another one")

    def _drop(self, buffer: Bytes | None) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close(buffer)
