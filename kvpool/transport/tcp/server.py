"""The node's end: a listening port, a thread that accepts, a thread for each connection. Everything about it is bounded.

Connections above `max_connections` are told so and closed; more than `_SPARE` of those at once are closed without a word.
"""

import logging
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

from kvpool.errors import ConfigError, KvpoolError, UnavailableError
from kvpool.transport.tcp.line import split
from kvpool.transport.tcp.serving import HELLO_NS, Admit, Served, Serving
from kvpool.transport.tcp.stream import PlainStream, Stream, shut, size_buffers, tune
from kvpool.transport.tcp.tls import secure

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 256
_SPARE: Final = 32
_BACKLOG: Final = 128
_JOIN_S: Final = 2.0
_PAUSE_S: Final = 0.1


def _let_in(token: str) -> None:
    """Everybody may."""


class TcpServer:
    """Serves `served` at `listen` (host:port, port 0: any free one) until closed; `address` is where.

    `tls` gives the context of the next handshake; without it connections are in the clear. `admit` decides about tokens.
    Raises `ConfigError` when it can't listen there.
    """

    def __init__(
        self,
        listen: str,
        served: Served,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        admit: Admit = _let_in,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        host, port = split(listen)
        listener = _listen(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{listener.getsockname()[1]}"
        self._crowd = _Crowd(listener, served, tls, admit, max_connections)
        self._finish = weakref.finalize(self, self._crowd.stop)

    @property
    def connections(self) -> int:
        """How many there are now."""
        return self._crowd.size

    def close(self) -> None:
        """Hang up on everybody; twice is fine. Clients on the way get an error."""
        self._finish()


class _Crowd:
    """The threads and their sockets; knows nothing of the `TcpServer`, so that the latter can be collected."""

    def __init__(
        self, listener: socket.socket, served: Served, tls: Callable[[], ssl.SSLContext] | None, admit: Admit, max_connections: int
    ) -> None:
        self._listener = listener
        self._served = served
        self._tls = tls
        self._admit = admit
        self._max = max_connections
        self._lock = threading.Lock()
        self._guests: dict[threading.Thread, Stream | None] = {}  # None: not to be aborted
        self._stopping = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name="kvpool-tcp", daemon=True)
        self._acceptor.start()

    @property
    def size(self) -> int:
        with self._lock:
            return len(self._guests)

    def stop(self) -> None:
        self._stopping.set()
        shut(self._listener)
        self._acceptor.join(_JOIN_S)
        self._listener.close()
        with self._lock:
            guests = dict(self._guests)
            for stream in guests.values():
                if stream is not None:
                    stream.abort()
        for thread in guests:
            thread.join(_JOIN_S)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._stopping.wait(_PAUSE_S):
                    log.error("can't accept a connection: %s", error.strerror)
                continue
            self._receive(connection, f"{address[0]}:{address[1]}")

    def _receive(self, connection: socket.socket, who: str) -> None:
        """Start a thread for a connection, if there is room for another one."""
        with self._lock:
            count = len(self._guests)
            if count >= self._max + _SPARE or self._stopping.is_set():
                connection.close()
                return
            full = f"this node has {self._max} connections already, which is its limit" if count >= self._max else ""
            thread = threading.Thread(target=self._serve, args=(connection, who, full), name=f"kvpool-tcp {who}", daemon=True)
            self._guests[thread] = None
        thread.start()

    def _serve(self, connection: socket.socket, who: str, full: str) -> None:
        """The whole life of one connection."""
        try:
            stream = self._open(connection)
            self._talk(stream, who, full)
        except UnavailableError as error:
            log.debug("%s is gone: %s", who, error)
        except KvpoolError as error:
            log.warning("%s was hung up on: %s", who, error)
        except Exception:
            log.exception("%s was hung up on", who)
        finally:
            with self._lock:
                self._guests.pop(threading.current_thread(), None)

    def _open(self, connection: socket.socket) -> Stream:
        """The stream over a new connection. Raises `AccessError`, `DeadlineError`, `UnavailableError`; it is closed then."""
        if self._tls is None:
            return PlainStream(connection)
        return secure(connection, self._tls(), time.monotonic_ns() + HELLO_NS)

    def _talk(self, stream: Stream, who: str, full: str) -> None:
        """Serve, and hang up in the end."""
        reset = True
        try:
            with self._lock:
                self._guests[threading.current_thread()] = stream
            if self._stopping.is_set():
                return
            why = Serving(stream, self._served, self._admit, full).talk()
            reset = False  # or it would not get to read why
            log.warning("%s was refused: %s", who, why)
        finally:
            with self._lock:
                self._guests[threading.current_thread()] = None
            stream.close(reset=reset)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, which hands its settings on to what it accepts."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"can't listen at {host}:{port}: {error.strerror}; give another address") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        size_buffers(listener, str(address[0]))
        tune(listener)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen at {host}:{port}: {error.strerror}; choose another port, or 0 for any free one") from None
    return listener
