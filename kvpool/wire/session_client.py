"""A client's end of a session with the node of its host. Blocking, for any thread; one call at a time.

Theory. A call sends one packet and waits for one, at most as long as it may. One that was not answered in time leaves an answer on its way
that the next call would take for its own, so the session is *broken* from then on: every call says so. It keeps its socket until `close`
all the same, because the node gives away what the session holds when the socket ends, and other threads may still be writing there.

Who sends one packet after the other is answered sooner than a core wakes up, so it looks for the answer a while before it sleeps
(`vigil.py`).

A child that a fork made would take its parent's answers, and keep the session alive after its parent's death: there the socket is closed
at once and every call is an error.
"""

import contextlib
import math
import os
import select
import socket
import struct
import threading
import time
import weakref
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvpool import cores
from kvpool.errors import ClosedError, DeadlineError, ProtocolError, UnavailableError
from kvpool.request.pool import Grant, Outcome, Reservation, Slab
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.session import (
    MAX_ANSWER,
    Answer,
    Greeting,
    Kind,
    Request,
    decode_answer,
    decode_greeting,
    encode_greeting,
    encode_request,
)
from kvpool.wire.session_server import socket_name
from kvpool.wire.vigil import Vigil

CALL_S = 5.0
"""How long a call may take unless told otherwise."""
_WATCH_NS = 250_000
"""For an answer, before sleeping: longer than a node takes that was asleep itself."""
_RETRY_S = 0.005
_CREDENTIALS = struct.Struct("3i")
_OUTCOMES = tuple(Outcome)


class _Ends(threading.local):
    """Whether the other end of a socket is closed. One poll a thread: it mustn't be used by two at once."""

    def __init__(self, sock: socket.socket) -> None:
        ends = select.poll()
        if sock.fileno() >= 0:
            ends.register(sock, select.POLLRDHUP)
        self.poll = ends.poll


class Session:
    """A session with `node`. Errors of all calls: `UnavailableError` (the node is gone, or the session is broken), `DeadlineError` (and
    then it is broken), `ConfigError` (refused, nothing was done), `ClosedError` (closed here, or another process's), `ProtocolError`.
    """

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._sock = sock
        self._path = path
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._answers = select.poll()
        self._answers.register(sock, select.POLLIN)
        self._ends = _Ends(sock)
        self._vigil = Vigil(_WATCH_NS)
        self._broken = ""
        self._closed = False
        _open_here.add(self)
        self.board_fd = -1
        """The node's board, read-only; this session's to close."""

    @classmethod
    def open(cls, path: str, node: NodeIdentity, owner: str, cell_fd: int, timeout_s: float) -> Self:
        """Connect to the socket at `path`, which must be of `node` in this life of it, and pass it the cell. `owner`: for the logs."""
        deadline_ns = _deadline(timeout_s)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        session = cls(sock, path)
        try:
            session._connect(deadline_ns)
            session._greet(node, owner, cell_fd, deadline_ns)
        except BaseException:
            session.close()
            raise
        return session

    @property
    def alive(self) -> bool:
        """Whether calls have a chance. A look at the socket, no packet."""
        if self._broken or self._closed or os.getpid() != self._pid:
            return False
        return not self._ends.poll(0)

    def slab(self, nbytes: int, timeout_s: float = CALL_S) -> Slab | None:
        """Room in advance, `nbytes` in one piece; None when there is none, or the session has had its share."""
        return _slab(self._call(Request(Kind.SLAB, nbytes=nbytes, core=cores.current()), timeout_s))

    def put(
        self,
        lease_id: int,
        blocks: Sequence[Reservation],
        *,
        sequence: int = 0,
        tenant: str = "",
        next_slab: int = 0,
        timeout_s: float = CALL_S,
    ) -> tuple[list[Outcome], Slab | None]:
        """Publish what was written to the front of a slab: blocks in order, each from a multiple of 64 bytes on. (Outcomes, next slab).

        `next_slab`: bytes of another slab that is wanted with the answer; the rest of this one stays. NO_SPACE for all: the lease is over.
        """
        answer = self._call(Request(Kind.PUT, lease_id, sequence, next_slab, tenant=tenant, blocks=blocks, core=cores.current()), timeout_s)
        return _outcomes(answer), _slab(answer)

    def reserve(
        self,
        blocks: Sequence[Reservation],
        *,
        sequence: int = 0,
        tenant: str = "",
        near: bool = False,
        timeout_s: float = CALL_S,
    ) -> tuple[int, list[Grant], bool]:
        """As `PoolRpc.reserve`, but it never waits: (lease id or 0, grants, whether room will come when blocks were written down)."""
        request = Request(Kind.RESERVE, sequence=sequence, near=near, tenant=tenant, blocks=blocks, core=cores.current())
        answer = self._call(request, timeout_s)
        return answer.lease_id, list(zip(_outcomes(answer), answer.offsets, strict=True)), answer.waiting

    def commit(self, lease_id: int, keys: Sequence[bytes], timeout_s: float = CALL_S) -> list[bool]:
        """As `PoolRpc.commit`."""
        return [done == 1 for done in self._call(Request(Kind.COMMIT, lease_id, keys=keys), timeout_s).outcomes]

    def release(self, lease_id: int, suspect: Sequence[bytes] = (), timeout_s: float = CALL_S) -> None:
        """As `PoolRpc.release`; lease 0 only tells of suspects. A slab's rest goes back."""
        self._call(Request(Kind.RELEASE, lease_id, keys=suspect), timeout_s)

    def close(self) -> None:
        """End the session; twice is fine. Nobody of this process may write to what it was granted, or look at what it holds, any more."""
        self._closed = True
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            with self._lock:
                self._sock.close()
        self._sock.close()
        board_fd, self.board_fd = self.board_fd, -1
        if board_fd >= 0:
            os.close(board_fd)

    def _call(self, request: Request, timeout_s: float) -> Answer:
        deadline_ns, data = _deadline(timeout_s), encode_request(request)
        self._check()
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlineError(f"{self._path}: other calls of this process took {timeout_s} s")
        try:
            self._check()
            packet = self._exchange(data, deadline_ns)
        finally:
            self._lock.release()
        try:
            return decode_answer(request, packet)
        except ProtocolError as error:
            self._broken = str(error)
            raise

    def _exchange(self, data: bytes, deadline_ns: int) -> bytes:
        try:
            self._send(data)
            return self._receive(deadline_ns)
        except OSError as error:
            self._broken = str(error)
            raise UnavailableError(f"{self._path}: {error}") from error
        except BaseException as error:  # an answer may still come
            self._broken = str(error) or "a call was interrupted"
            raise

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(f"the session at {self._path} is of the process that opened it, before a fork; open another one")
        if self._closed:
            raise ClosedError(f"the session at {self._path} is closed; open another one")
        if self._broken:
            raise UnavailableError(f"{self._path}: the session is broken: {self._broken}")

    def _send(self, data: bytes) -> None:
        try:
            self._sock.send(data)
        except BlockingIOError:  # nothing but a message that nobody answered can be in its way
            raise DeadlineError(f"{self._path}: the node doesn't read") from None

    def _receive(self, deadline_ns: int) -> bytes:
        """The next packet; `OSError` when there is none ever."""
        data = self._watch(deadline_ns)
        if data is None:
            self._wait(deadline_ns)
            data = self._sock.recv(MAX_ANSWER)
        if not data:
            raise ConnectionResetError("the node ended the session")
        return data

    def _watch(self, deadline_ns: int) -> bytes | None:
        """The next packet, if it is worth staying awake for and comes soon."""
        until_ns, receive, data = min(self._vigil.until(time.monotonic_ns()), deadline_ns), self._sock.recv, None
        if not until_ns:
            return None
        while data is None and time.monotonic_ns() < until_ns:
            with contextlib.suppress(BlockingIOError):
                data = receive(MAX_ANSWER)
        self._vigil.ended(came=data is not None)
        return data

    def _wait(self, deadline_ns: int) -> None:
        left_ms = math.ceil((deadline_ns - time.monotonic_ns()) / 1e6)
        if left_ms <= 0 or not self._answers.poll(left_ms):
            raise DeadlineError(f"{self._path}: no answer in time")

    def _connect(self, deadline_ns: int) -> None:
        try:
            with socket_name(Path(self._path)) as name:
                while True:
                    with contextlib.suppress(BlockingIOError):
                        self._sock.connect(name)
                        break
                    if time.monotonic_ns() >= deadline_ns:
                        raise DeadlineError(f"{self._path}: the node takes nobody in")
                    time.sleep(_RETRY_S)
            _, uid, _ = _CREDENTIALS.unpack(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        except OSError as error:
            raise UnavailableError(f"{self._path}: {error.strerror or error}") from error
        if uid not in (0, os.geteuid()):
            raise UnavailableError(f"{self._path} belongs to user {uid}, not to us")

    def _greet(self, node: NodeIdentity, owner: str, cell_fd: int, deadline_ns: int) -> None:
        try:
            socket.send_fds(self._sock, [encode_greeting(Greeting(node, owner))], [cell_fd])
            self._wait(deadline_ns)
            data, ancillary, _, _ = self._sock.recvmsg(MAX_ANSWER, socket.CMSG_SPACE(array("i").itemsize), socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise UnavailableError(f"{self._path}: {error}") from error
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                (self.board_fd,) = array("i", content)
        if not data:
            raise UnavailableError(f"{self._path}: the node took nobody in")
        greeting = decode_greeting(data)
        if greeting.refused:
            raise UnavailableError(f"{self._path}: {greeting.text}")
        if greeting.node != node:
            raise UnavailableError(f"{self._path} is of node {greeting.node}, not of {node}")
        if self.board_fd < 0:
            raise ProtocolError(f"{self._path}: the node passed no board")


_open_here: "weakref.WeakSet[Session]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    for session in list(_open_here):
        session._sock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _outcomes(answer: Answer) -> list[Outcome]:
    return [_OUTCOMES[value] for value in answer.outcomes]


def _slab(answer: Answer) -> Slab | None:
    return Slab(answer.lease_id, answer.slab_offset, answer.slab_bytes) if answer.slab_bytes else None


def _deadline(timeout_s: float) -> int:
    return time.monotonic_ns() + int(timeout_s * 1e9)
