"""The same bytes by TLS. They go record by record through a buffer of OpenSSL's, so the limits of time are Python's here."""

import socket
import ssl
from collections.abc import Callable, Sequence

from kvpool.errors import AccessError, DeadlineError, UnavailableError
from kvpool.transport.tcp.stream import NEAR_NS, NEVER_NS, Piece, hang_up, ns_left, shut


def secure(connection: socket.socket, context: ssl.SSLContext, deadline_ns: int, name: str | None = None) -> "TlsStream":
    """Agree on TLS over `connection`, which belongs to the stream from now on, as the server, or as a client of a server called `name`.

    Raises `AccessError` (no trust, or no TLS), `DeadlineError`, `UnavailableError`; the connection is closed then.
    """
    secured = connection
    try:
        connection.settimeout(ns_left(deadline_ns) / 1e9)
        secured = context.wrap_socket(connection, server_side=name is None, server_hostname=name, do_handshake_on_connect=False)
        secured.do_handshake()
        return TlsStream(secured)
    except DeadlineError:
        secured.close()
        raise
    except TimeoutError:
        secured.close()
        raise DeadlineError("it took too long to agree on TLS") from None
    except ssl.SSLError as error:
        secured.close()
        raise AccessError(f"no TLS: {getattr(error, 'verify_message', error.reason)}") from None
    except (OSError, ValueError) as error:  # ValueError: gone before it began
        secured.close()
        raise UnavailableError(f"it hung up instead of agreeing on TLS: {getattr(error, 'strerror', error)}") from None


class TlsStream:
    """`Stream` through an established TLS connection."""

    def __init__(self, connection: ssl.SSLSocket) -> None:
        self._socket = connection
        self._limit = 0  # ns

    @property
    def descriptor(self) -> int:
        """See `Stream.descriptor`."""
        return self._socket.fileno()

    def send(self, pieces: Sequence[Piece], deadline_ns: int) -> None:
        """See `Stream.send`."""
        for piece in pieces:
            self._move(memoryview(piece), deadline_ns, self._socket.send)

    def receive(self, pieces: Sequence[Piece], deadline_ns: int) -> None:
        """See `Stream.receive`."""
        for piece in pieces:
            self._move(memoryview(piece), deadline_ns, self._socket.recv_into)

    def receive_some(self, pieces: Sequence[memoryview], least: int, deadline_ns: int) -> int:
        """See `Stream.receive_some`."""
        got = 0
        for piece in pieces:
            start = got
            while got < least and got - start < len(piece):
                got += self._once(piece[got - start :], deadline_ns, self._socket.recv_into)
        return got

    def abort(self) -> None:
        """See `Stream.abort`."""
        shut(self._socket)

    def close(self, *, reset: bool = False) -> None:
        """See `Stream.close`."""
        hang_up(self._socket, reset=reset)

    def _move(self, view: memoryview, deadline_ns: int, call: Callable[[memoryview], int]) -> None:
        while view:
            view = view[self._once(view, deadline_ns, call) :]

    def _once(self, view: memoryview, deadline_ns: int, call: Callable[[memoryview], int]) -> int:
        """The bytes that one call has moved."""
        left = NEVER_NS if deadline_ns == NEVER_NS else ns_left(deadline_ns)
        if not -NEAR_NS < left - self._limit < NEAR_NS:  # setting it is a system call, and there is a record every 16 KiB
            self._limit = left
            self._socket.settimeout(None if left == NEVER_NS else left / 1e9)
        try:
            moved = call(view)
        except TimeoutError:
            raise DeadlineError("the deadline passed before the bytes had moved") from None
        except OSError as error:
            raise UnavailableError(f"the connection broke: {error.strerror or error}") from None
        if not moved:
            raise UnavailableError("the other end hung up")
        return moved
