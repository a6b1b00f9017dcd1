"""Bytes over one connected socket: all of them by a deadline, or an exception. Here in the clear; `tls.py` has the other one.

Theory. A call is one system call, however many pieces it has: `sendmsg` gathers from and `recvmsg` (MSG_WAITALL) scatters to
the places where the bytes belong, and both wait in the kernel, without the GIL. The time limit is the kernel's, too (SO_SNDTIMEO,
SO_RCVTIMEO): it bounds the whole call, and a socket that Python doesn't poll costs one system call less. Setting it is one, too, so a limit
that differs by less than a millisecond from the one that is there is not set: calls of equal patience share one.

Whoever uses a stream is its only user, but any thread may `abort` it: that wakes the user up, who then closes. A descriptor that is closed
under a waiting call could be another file's by the time the call looks again.

On loopback, buffers of 256 KiB keep what is on the way in the processor's cache: 3.5 GB/s instead of 2.8 with those that the kernel
chooses. Everywhere else it chooses by the round trip.
"""

import contextlib
import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from kvpool.errors import DeadlineError, UnavailableError
from kvpool.units import KIB, MS

Piece = bytes | bytearray | memoryview
"""Contiguous bytes; an array goes as its `data`."""

T = TypeVar("T")

IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
NEVER_NS: Final = sys.maxsize
"""A deadline that doesn't come."""
NEAR_NS: Final = MS
"""Limits of time that differ by less are the same."""

_LOOPBACK_BUFFER: Final = 256 * KIB
_TIMEVAL: Final = struct.Struct("@ll")
_LINGER: Final = struct.Struct("@ii")
_SILENCE_MS: Final = 10_000


class Stream(Protocol):
    """One connection. Calls raise `DeadlineError`, or `UnavailableError` when the other end is gone; after either it is of no more use."""

    @property
    def descriptor(self) -> int:
        """To poll."""
        ...

    def send(self, pieces: Sequence[Piece], deadline_ns: int) -> None:
        """Send all of them."""
        ...

    def receive(self, pieces: Sequence[Piece], deadline_ns: int) -> None:
        """Fill all of them (writable)."""
        ...

    def receive_some(self, piece: memoryview, least: int, deadline_ns: int) -> int:
        """Fill the first `least` bytes of `piece` at least, and more of it with what has come already; how many."""
        ...

    def abort(self) -> None:
        """End calls under way, from any thread."""
        ...

    def close(self, *, reset: bool = False) -> None:
        """Let go; `reset` drops what is still on the way. By its user only; twice is fine."""
        ...


class PlainStream:
    """`Stream` in the clear."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._limits = {socket.SO_SNDTIMEO: NEVER_NS, socket.SO_RCVTIMEO: NEVER_NS}  # as the kernel has them, in ns; -1: passed
        connection.settimeout(None)

    @property
    def descriptor(self) -> int:
        """See `Stream.descriptor`."""
        return self._socket.fileno()

    def send(self, pieces: Sequence[Piece], deadline_ns: int) -> None:
        """See `Stream.send`."""
        self._move(pieces, deadline_ns, socket.SO_SNDTIMEO, self._gather)

    def receive(self, pieces: Sequence[Piece], deadline_ns: int) -> None:
        """See `Stream.receive`."""
        self._move(pieces, deadline_ns, socket.SO_RCVTIMEO, self._fill)

    def receive_some(self, piece: memoryview, least: int, deadline_ns: int) -> int:
        """See `Stream.receive_some`."""
        got = 0
        while got < least:
            got += self._once(self._socket.recv_into, piece[got:], deadline_ns, socket.SO_RCVTIMEO)
        return got

    def abort(self) -> None:
        """See `Stream.abort`."""
        shut(self._socket)

    def close(self, *, reset: bool = False) -> None:
        """See `Stream.close`."""
        hang_up(self._socket, reset=reset)

    def _gather(self, pieces: Sequence[Piece]) -> int:
        return self._socket.sendmsg(pieces)

    def _fill(self, pieces: Sequence[Piece]) -> int:
        return self._socket.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]

    def _move(self, pieces: Sequence[Piece], deadline_ns: int, limit: int, call: Callable[[Sequence[Piece]], int]) -> None:
        total = sum(map(len, pieces))
        while total:
            moved = self._once(call, pieces[:IOV_MAX], deadline_ns, limit)
            total -= moved
            if total and moved:
                pieces = _without(pieces, moved)

    def _once(self, call: Callable[[T], int], what: T, deadline_ns: int, limit: int) -> int:
        """The bytes that one call has moved; 0 when its limit has passed and the deadline hasn't."""
        self._limit(limit, deadline_ns)
        try:
            moved = call(what)
        except BlockingIOError:
            self._limits[limit] = -1  # of no use any more
            return 0
        except OSError as error:
            raise UnavailableError(f"the connection broke: {error.strerror}") from None
        if not moved:
            raise UnavailableError("the other end hung up")
        return moved

    def _limit(self, limit: int, deadline_ns: int) -> None:
        """Let the kernel wait no longer than until then, or not much: a limit that is there from before and near enough is left alone.

        Where there is no deadline any limit will do: when it has passed, there is none the next time.
        """
        was = self._limits[limit]
        never = deadline_ns == NEVER_NS
        wanted = NEVER_NS if never else ns_left(deadline_ns)
        if was < 0 or not (never or -NEAR_NS < wanted - was < NEAR_NS):
            self._limits[limit] = wanted
            us = 0 if never else -(-wanted // 1000)  # 0 is for ever
            self._socket.setsockopt(socket.SOL_SOCKET, limit, _TIMEVAL.pack(us // 1_000_000, us % 1_000_000))


def tune(connection: socket.socket) -> None:
    """What both ends set: no waiting for more to send, and a peer that has gone without a word is noticed within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)


def size_buffers(connection: socket.socket, host: str) -> None:
    """Small buffers where `host` is this machine; before connecting or listening, or they come too late for the window."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER)


def ns_left(deadline_ns: int) -> int:
    """Nanoseconds left. Raises `DeadlineError` when there are none."""
    left = deadline_ns - time.monotonic_ns()
    if left <= 0:
        raise DeadlineError("the deadline passed before the bytes had moved")
    return left


def _without(pieces: Sequence[Piece], moved: int) -> Sequence[Piece]:
    """`pieces` but for their first `moved` bytes."""
    for index, piece in enumerate(pieces):
        if moved < len(piece):
            return [memoryview(piece)[moved:], *pieces[index + 1 :]]
        moved -= len(piece)
    return ()


def shut(connection: socket.socket) -> None:
    """End what its user waits for, from any thread; the user closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # not SSLSocket's, which would go on in the clear


def hang_up(connection: socket.socket, *, reset: bool) -> None:
    """Close it; `reset` drops what is on the way."""
    if reset:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))
    connection.close()
