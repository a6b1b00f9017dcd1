"""Room in a node's arena that was granted before it is needed: a small put copies into it and sends one message.

A slab is used by one put at a time, from its front on. Puts at the same time use one slab each; at most `_KEEP` lie idle, and one that
nobody has used for `_IDLE_NS` goes back, so that a client that only reads pins no memory.
"""

import contextlib
import threading
import time
from typing import Final

from kvpool.errors import KvpoolError
from kvpool.request.pool import Slab
from kvpool.units import KIB, MIB, SECOND
from kvpool.wire.session_client import Session

_SLAB_BYTES: Final = 4 * MIB
_SHARE: Final = 64
"""A slab is at most this part of an arena."""
_LEAST_BYTES: Final = 64 * KIB
_KEEP: Final = 2
_IDLE_NS: Final = 2 * SECOND
_CALL_S: Final = 1.0


class Slabs:
    """The slabs of one session. Errors of its calls are the session's."""

    def __init__(self, session: Session, capacity: int) -> None:
        size = min(_SLAB_BYTES, capacity // _SHARE // KIB * KIB)
        self.slab_bytes = size if size >= _LEAST_BYTES else 0
        """Bytes of a new slab; 0 where the arena is too small for any."""
        self.largest_put = self.slab_bytes // 4
        """Bytes of the largest put that is worth a slab's front."""
        self._session = session
        self._lock = threading.Lock()
        self._idle: list[tuple[Slab, int]] = []

    @property
    def idle(self) -> bool:
        """Whether any lies idle."""
        return bool(self._idle)

    def take(self, nbytes: int, timeout_s: float) -> Slab | None:
        """A slab with room for `nbytes`; None when the node has none to give. One that is too short by now goes back.

        Once the session is over there is none, idle ones included: raises what its calls raise.
        """
        with self._lock:
            slab = self._idle.pop()[0] if self._idle and self._session.alive else None
        if slab is not None and slab.nbytes < nbytes:
            self.drop(slab)
            slab = None
        return slab or self._session.slab(self.slab_bytes, timeout_s)

    def keep(self, slab: Slab) -> None:
        """Keep what is left of a slab for the next put; what is too much, or too little, goes back."""
        if slab.nbytes:
            with self._lock:
                if len(self._idle) < _KEEP:
                    self._idle.append((slab, time.monotonic_ns()))
                    return
        self.drop(slab)

    def drop(self, slab: Slab) -> None:
        """Give a slab back. That it can't be is no matter: the session is over then, and its slabs with it."""
        with contextlib.suppress(KvpoolError):
            self._session.release(slab.lease_id, (), _CALL_S)

    def give_back_idle(self) -> None:
        """Give back the slabs that nobody has used for a while."""
        before_ns = time.monotonic_ns() - _IDLE_NS
        with self._lock:
            old = [slab for slab, used_ns in self._idle if used_ns < before_ns]
            self._idle = [one for one in self._idle if one[1] >= before_ns]
        for slab in old:
            self.drop(slab)
