"""A node's end of sessions: the socket, whom it lets in, and the packets. What a session may do is its host's business (`SessionHost`).

Theory. All of it runs on the node's event loop and nothing waits: packets are read when they are there, a few a wake-up, and an answer that
doesn't fit the socket's buffer at once ends the session, for its client doesn't read. A session ends in one of two ways, and its host must
know which. *Gone*: the client closed its socket, or the kernel did after its process. Nobody writes or looks any more. *Ended here*: it
said what can't be, or didn't read, or the node stops. Its process may still be at work in the arena.

While one packet follows the other the loop doesn't sleep between them (`vigil.py`): it goes on turning, and does whatever else there is.

The socket is made under another name and then renamed, so whoever finds it can connect, and one that refuses belongs to a dead node.
"""

import asyncio
import contextlib
import logging
import os
import socket
import struct
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from kvpool import cores
from kvpool.errors import ConfigError, KvpoolError, ProtocolError
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.session import MAX_MESSAGE, Answer, Greeting, Request, decode_greeting, decode_request, encode_answer, encode_greeting
from kvpool.wire.vigil import Vigil

log = logging.getLogger(__name__)

MAX_SESSIONS: Final = 256
GREETING_S: Final = 5.0
"""Within so long a client must have said who it is."""
_AT_ONCE = 16
_WATCH_NS = 250_000
"""For the next packet, before sleeping: longer than a client takes that was asleep itself."""
_BACKLOG = 64
_PAUSE_S = 1.0
_CREDENTIALS = struct.Struct("3i")
_MAX_FDS = 4


class SessionCalls(Protocol):
    """One session at its host."""

    def serve(self, request: Request) -> Answer:
        """Answer at once. Raises `KvpoolError` to refuse, and the session goes on."""
        ...

    def end(self, *, gone: bool) -> None:
        """It is over; `gone`: nobody of its process writes or looks any more."""
        ...


class SessionHost(Protocol):
    """What sessions are opened with."""

    @property
    def identity(self) -> NodeIdentity:
        """Who answers."""
        ...

    @property
    def board_fd(self) -> int:
        """The descriptor that each client gets."""
        ...

    def open(self, owner: str, pid: int, cell_fd: int) -> SessionCalls:
        """Take a client in; `cell_fd` stays the caller's. Raises `KvpoolError` to refuse."""
        ...


class _Link:
    """One connection; `calls` once it was greeted."""

    __slots__ = ("calls", "pid", "sock")

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock = sock
        self.pid = pid
        self.calls: SessionCalls | None = None


class SessionServer:
    """Listens at `path` from `start` to `close`, on the running loop. Only processes of the same user, and root, get in."""

    def __init__(self, path: Path, host: SessionHost) -> None:
        self.path = path
        self._host = host
        self._links: set[_Link] = set()
        self._listener: socket.socket | None = None
        self._buffer = bytearray(MAX_MESSAGE)
        self._vigil = Vigil(_WATCH_NS)
        self._watch_ns = 0
        self._came = False

    def start(self) -> None:
        """Make the socket, mode 0600. Raises `ConfigError`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        fresh = self.path.with_name(self.path.name + ".new")
        try:
            os.fchmod(listener.fileno(), 0o600)
            fresh.unlink(missing_ok=True)
            with socket_name(fresh) as name:
                listener.bind(name)
            listener.listen(_BACKLOG)
            fresh.rename(self.path)
        except OSError as error:
            listener.close()
            raise ConfigError(f"can't make the socket {self.path}: {error.strerror or error}") from error
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close(self) -> None:
        """End all sessions, remove the socket; twice is fine."""
        if self._listener is not None:
            self.path.unlink(missing_ok=True)
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for link in list(self._links):
            self._end(link)

    def drop(self, calls: SessionCalls, why: str) -> None:
        """End one session, for a reason of the host's."""
        for link in [link for link in self._links if link.calls is calls]:
            self._end(link, why)

    def __len__(self) -> int:
        return len(self._links)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_AT_ONCE):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptors left: look again later, instead of all the time
                log.error("can't take a session in: %s", error)
                loop.remove_reader(self._listener)
                loop.call_later(_PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if uid not in (0, os.geteuid()):
                log.warning("process %d of user %d may not have a session", pid, uid)
                sock.close()
                continue
            link = _Link(sock, pid)
            self._links.add(link)
            loop.add_reader(sock, self._readable, link)
            loop.call_later(GREETING_S, self._expect, link)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _expect(self, link: _Link) -> None:
        """It is time that this client has said who it is."""
        if link in self._links and link.calls is None:
            self._end(link, "it didn't say who it is")

    def _readable(self, link: _Link) -> None:
        try:
            if link.calls is None:
                self._greet(link)
                return
            for _ in range(_AT_ONCE):
                count = link.sock.recv_into(self._buffer, 0, socket.MSG_TRUNC)
                if not count:
                    self._emptied(link)
                    return
                if count > MAX_MESSAGE:
                    raise ProtocolError(f"a packet of {count} bytes")
                core = self._answer(link, link.calls, bytes(memoryview(self._buffer)[:count]))
                self._stay(core)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._end(link, str(error))
        except OSError:
            self._end(link, gone=True)
        except Exception:
            log.exception("serving a session failed")
            self._end(link, "serving it failed")

    def _answer(self, link: _Link, calls: SessionCalls, data: bytes) -> int:
        """Serve one request; the core that it was sent from."""
        request = decode_request(data)
        try:
            answer = calls.serve(request)
        except KvpoolError as error:
            answer = Answer(refused=str(error) or type(error).__name__)
        self._send(link, encode_answer(request.kind, answer))
        return request.core

    def _stay(self, core: int) -> None:
        """A packet that was sent from `core` was answered: stay awake for the next one, if that is worth it, and on another core."""
        if self._watch_ns:
            self._came = True
        else:
            self._watch_ns = self._vigil.until(time.monotonic_ns())
            if self._watch_ns:
                asyncio.get_running_loop().call_soon(self._watch)
        if self._vigil.brisk and core == cores.current() != -1:
            cores.leave()

    def _watch(self) -> None:
        """One turn of the loop that doesn't sleep."""
        now_ns = time.monotonic_ns()
        if self._came:
            self._came = False
            self._vigil.ended(came=True)
            self._watch_ns = self._vigil.until(now_ns)
        elif now_ns >= self._watch_ns:
            self._vigil.ended(came=False)
            self._watch_ns = 0
        if self._watch_ns:
            asyncio.get_running_loop().call_soon(self._watch)

    def _send(self, link: _Link, data: bytes) -> None:
        try:
            link.sock.send(data)
        except BlockingIOError:
            raise ProtocolError("it doesn't read its answers") from None

    def _emptied(self, link: _Link) -> None:
        """Nothing came: the end, and then nothing comes ever; or a packet without bytes, which nobody sends."""
        if link.sock.recv(1, socket.MSG_PEEK):
            raise ProtocolError("a packet of 0 bytes")
        self._end(link, gone=True)

    def _greet(self, link: _Link) -> None:
        space = socket.CMSG_SPACE(_MAX_FDS * array("i").itemsize)
        data, ancillary, flags, _ = link.sock.recvmsg(MAX_MESSAGE, space, socket.MSG_CMSG_CLOEXEC)
        descriptors = array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        try:
            if not data:
                self._end(link, gone=True)
                return
            try:
                self._take_in(link, data, descriptors, whole=not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
            except KvpoolError as error:
                self._send(link, encode_greeting(Greeting(self._host.identity, str(error), refused=True)))
                raise ProtocolError(f"refused: {error}") from error
            answer = encode_greeting(Greeting(self._host.identity))
            socket.send_fds(link.sock, [answer], [self._host.board_fd])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _take_in(self, link: _Link, data: bytes, descriptors: "array[int]", *, whole: bool) -> None:
        greeting, me = decode_greeting(data), self._host.identity
        if greeting.node != me:
            raise ProtocolError(
                f"this is node {me.node_id}/{me.incarnation}, the greeting was meant for {'/'.join(map(str, greeting.node))}"
            )
        if not whole or len(descriptors) != 1 or greeting.refused:
            raise ProtocolError("a greeting brings one descriptor, that of a cell")
        if len(self._links) > MAX_SESSIONS:
            raise ConfigError(f"{MAX_SESSIONS} sessions are open, which is the most that a node has")
        link.calls = self._host.open(greeting.text, link.pid, descriptors[0])

    def _end(self, link: _Link, why: str = "", *, gone: bool = False) -> None:
        if link not in self._links:
            return
        self._links.remove(link)
        if why:
            log.warning("the session of process %d is over: %s", link.pid, why)
        asyncio.get_running_loop().remove_reader(link.sock)
        try:
            if link.calls is not None:
                link.calls.end(gone=gone)
        finally:
            link.sock.close()


def _name(node: NodeIdentity) -> str:
    return f"{node.node_id}/{node.incarnation}"


@contextlib.contextmanager
def socket_name(path: Path) -> Iterator[str]:
    """What to bind or connect to for the socket at `path`, however long that is (addresses have room for 107 bytes). Raises `OSError`."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
