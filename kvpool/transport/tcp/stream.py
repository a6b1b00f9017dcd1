"""Bytes over one connected socket: all of them by a deadline, or an exception. Here in the clear; `tls.py` has the other one.

Theory. A call is one system call, however many pieces it has: `sendmsg` gathers from and `recvmsg` (MSG_WAITALL) scatters to
the places where the bytes belong, and both wait in the kernel, without the GIL. The time limit is the kernel's, too (SO_SNDTIMEO,
SO_RCVTIMEO): it bounds the whole call, and a socket that Python doesn't poll costs one system call less. Setting it is one, too, so a limit
that differs by less than a millisecond from the one that is there is not set: calls of equal patience share one.

A thread that sleeps takes some 30 us to wake up, and the sender pays a third of them. So where the other end's last word came soon, the
next one is looked for during `_LOOK_NS` before sleeping, giving way to whoever wants the core. Looking in vain is rare: after one time
the next few words are waited for asleep (4, then 8, then 16), and words that come late, as over most networks, are never looked for. One
stream of a process looks: who finds that another one has heard something meanwhile sleeps. On loopback whoever receives a large answer
looks for more of it, too, or it would sleep and be woken for every 64 KiB; but not where it looks in vain.

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
from kvpool.units import KIB, MS, US

Piece = bytes | bytearray | memoryview
"""Contiguous bytes; an array goes as its `data`."""

T = TypeVar("T")

IOV_MAX: Final = os.sysconf("SC_IOV_MAX")
NEVER_NS: Final = sys.maxsize
"""A deadline that doesn't come."""
NEAR_NS: Final = MS
"""Limits of time that differ by less are the same."""

_LOOK_NS: Final = 250 * US
_LOOK_ON_NS: Final = 50 * US
"""For more of what has begun to come."""
_VAIN: Final = 2
"""Looks for more in vain, until the next word: who sends has others to serve."""
_SOON_NS: Final = 300 * US
"""A word that was waited for asleep would have been found by looking: both ends took their time to wake up."""
_REST: Final = 4
_LONGEST_REST: Final = 16
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

    def receive_some(self, pieces: Sequence[memoryview], least: int, deadline_ns: int) -> int:
        """The other end's next word: fill the first `least` bytes of `pieces` at least, and more with what has come already; how many."""
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
        self._near = is_loopback(connection.getpeername()[0])
        self._name = object()
        self._soon = False  # the last word came so soon that looking for the next one is worth it
        self._rest = 0  # words not to be looked for
        self._next_rest = _REST
        self._vain = 0  # looks for more since the last word
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
        while (self._near or self._soon) and self._vain < _VAIN and any(pieces):
            looked = self._look(pieces[:IOV_MAX], _LOOK_ON_NS)
            if not looked:
                self._vain += 1
                break
            pieces = without(pieces, looked)
            ns_left(deadline_ns)
        self._move(pieces, deadline_ns, socket.SO_RCVTIMEO, self._fill)

    def receive_some(self, pieces: Sequence[memoryview], least: int, deadline_ns: int) -> int:
        """See `Stream.receive_some`."""
        pieces, began_ns = pieces[:IOV_MAX], time.monotonic_ns()
        got = self._look(pieces, _LOOK_NS) if self._soon else 0
        if self._soon:
            self._rest, self._next_rest = (0, _REST) if got else (self._next_rest, min(2 * self._next_rest, _LONGEST_REST))
        while got < least:
            got += self._once(self._take, without(pieces, got) if got else pieces, deadline_ns, socket.SO_RCVTIMEO)
        self._rest = max(0, self._rest - 1)
        self._soon = not self._rest and time.monotonic_ns() - began_ns < _SOON_NS
        self._vain = 0
        _Heard.last = self._name
        return got

    def abort(self) -> None:
        """See `Stream.abort`."""
        shut(self._socket)

    def close(self, *, reset: bool = False) -> None:
        """See `Stream.close`."""
        hang_up(self._socket, reset=reset)

    def _gather(self, pieces: Sequence[Piece]) -> int:
        return self._socket.sendmsg(pieces)

    def _take(self, pieces: Sequence[Piece]) -> int:
        return self._socket.recvmsg_into(pieces)[0]

    def _fill(self, pieces: Sequence[Piece]) -> int:
        return self._socket.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]

    def _look(self, pieces: Sequence[Piece], limit_ns: int) -> int:
        """What comes within the limit, or 0: nothing, an end or an error, which whoever waits then will see."""
        end_ns, receive = time.monotonic_ns() + limit_ns, self._socket.recvmsg_into
        while _Heard.last is self._name:
            try:
                return receive(pieces, 0, socket.MSG_DONTWAIT)[0]
            except BlockingIOError:
                if time.monotonic_ns() > end_ns:
                    break
                os.sched_yield()
            except OSError:
                break
        return 0

    def _move(self, pieces: Sequence[Piece], deadline_ns: int, limit: int, call: Callable[[Sequence[Piece]], int]) -> None:
        total = sum(map(len, pieces))
        while total:
            moved = self._once(call, pieces[:IOV_MAX], deadline_ns, limit)
            total -= moved
            if total and moved:
                pieces = without(pieces, moved)

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


class _Heard:
    """The name of the stream of this process that was the last to hear a word: no other looks. Two that write it at once do no harm."""

    last: object = None


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
    if is_loopback(host):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_BUFFER)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LOOPBACK_BUFFER)


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of this machine that no other one can reach; a name is none."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def ns_left(deadline_ns: int) -> int:
    """Nanoseconds left. Raises `DeadlineError` when there are none."""
    left = deadline_ns - time.monotonic_ns()
    if left <= 0:
        raise DeadlineError("the deadline passed before the bytes had moved")
    return left


def without(pieces: Sequence[Piece], moved: int) -> Sequence[Piece]:
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
