"""Lanes to one node on one session: hand out the work, progress, wait, and end well. One thread at a time; `UcxReach` sees to that.

Theory. UCX promises that a request ends only if its worker is progressed, and nothing about when. So every wait here has a deadline, and
whoever misses it must close the wire: while a request is outstanding the network may still write into the caller's buffer, and a forced
close is the one way to end it. If even that does not end within `_CLOSE_NS`, the memory UCX may still touch is kept for the life of the
process.

While bytes move the thread polls; when nothing has moved for `_SPIN_NS` it arms the worker's descriptor and sleeps.

No buffer is registered by us: where a transport needs that, UCX does it itself and drops the registration when the memory is unmapped. A
cache of our own, by address, would send the network card to the pages a freed array once had.
"""

import logging
import select
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvpool.errors import DeadlineError, UnavailableError
from kvpool.transport.offer import UcxOffer
from kvpool.transport.reach import Bytes, Run
from kvpool.transport.ucx.drain import give_way
from kvpool.transport.ucx.lane import Lane, is_one_sided, pieces
from kvpool.transport.ucx.session import UcpSession, UcxSettings
from kvpool.units import MS, SECOND, US

_log = logging.getLogger(__name__)

_SPIN_NS: Final = 50 * US
_SLEEP_MS: Final = 20  # also how late a stop wish from another thread is seen
_CLOSE_NS: Final = 2 * SECOND
_kept: list[object] = []  # what a wire that did not close may still touch


class Wire:
    """A session and its lanes to the node of `offer`: one, and where `look` finds TCP, as many as the settings say.

    Raises `ConfigError` (no usable UCX here) or `UnavailableError` (the offer leads nowhere from here). Moving sends the first byte.
    """

    def __init__(self, offer: UcxOffer, settings: UcxSettings) -> None:
        self._session, self._offer, self._count = UcpSession(settings), offer, settings.lanes
        self._poller = select.poll()
        self._poller.register(self._session.descriptor, select.POLLIN)
        self._lanes: list[Lane] = []
        try:
            self._lanes.append(Lane(self._session, offer))
        except UnavailableError:
            self.close(None)
            raise

    @property
    def library(self) -> str:
        """Which UCX is in use, for people."""
        return self._session.library.text

    def look(self) -> tuple[str, ...]:
        """After the first transfer: what UCX sends over.

        Where the hardware serves by itself the one lane, a queue pair at either end, takes everything from now on. Elsewhere the others
        join it; raises `UnavailableError` if they can't.
        """
        transports = self._lanes[0].transports()
        self._lanes[0].one_sided = is_one_sided(transports)
        while not self._lanes[0].one_sided and len(self._lanes) < self._count:
            self._lanes.append(Lane(self._session, self._offer))
        return transports

    def move(self, runs: Sequence[Run], buffer: Bytes, *, put: bool, deadline_ns: int, stop: Callable[[], None]) -> None:
        """Get (or put) every run; the caller has checked their bounds. `stop` is asked now and then, and may raise.

        Raises `DeadlineError`, `UnavailableError` or what `stop` raises; the wire must be closed then.
        """
        address, one_sided, lanes = buffer.ctypes.data, self._lanes[0].one_sided, self._lanes
        work = pieces(runs, one_sided=one_sided)
        piece = next(work, None)
        spin_until = 0
        while True:
            for lane in lanes:
                while piece is not None and lane.room:
                    lane.post(piece, address, put=put)
                    piece = next(work, None)
                    if piece is None and put and one_sided:
                        lane.flush()
            if piece is None and not any(lane.pending for lane in lanes):
                return
            spin_until = self._wait(spin_until, deadline_ns)
            stop()
            for lane in lanes:
                lane.reap()

    def close(self, buffer: Bytes | None) -> bool:
        """Close by force, see every request end, free everything. Only once.

        False when UCX did not end in time: session and `buffer` (what outstanding requests may touch) are then kept for ever.
        """
        for lane in self._lanes:
            lane.force()
        until = time.monotonic_ns() + _CLOSE_NS
        while any(not lane.sweep() for lane in self._lanes):
            self._session.progress()
            if time.monotonic_ns() >= until:
                _log.error("a UCX endpoint did not close within %d s; its memory is kept", _CLOSE_NS // SECOND)
                _kept.append((self, buffer))
                return False
        self._session.destroy()
        return True

    def _wait(self, spin_until: int, deadline_ns: int) -> int:
        """Progress; sleep if nothing has moved since `spin_until`. Returns the new `spin_until`. Raises `DeadlineError`."""
        moved, now_ns = self._session.progress(), time.monotonic_ns()
        if now_ns >= deadline_ns:
            raise DeadlineError("the deadline passed before the bytes had moved")
        if moved or not spin_until:
            return now_ns + _SPIN_NS
        if now_ns < spin_until:
            give_way()
        elif self._session.arm():
            self._poller.poll(min(_SLEEP_MS, max(1, (deadline_ns - now_ns) // MS)))
        return spin_until
