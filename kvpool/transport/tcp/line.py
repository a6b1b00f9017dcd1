"""One connection of a client: dial, say hello, ask and take the answer. One thread at a time; `lines.py` sees to that.

Answers go where they belong at once: first the head (and, of a GET, the byte per key), then all frames or runs in one call to the
kernel. A line that has raised is of no more use, because nobody knows how much of an answer is still on the way.
"""

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.block import BlockKey
from kvpool.clock import seconds_left
from kvpool.errors import ConfigError, ProtocolError, UnavailableError
from kvpool.transport.reach import Bytes, Run, check_deadline
from kvpool.transport.tcp import wire
from kvpool.transport.tcp.stream import Piece, PlainStream, Stream, ns_left, size_buffers, tune
from kvpool.transport.tcp.tls import secure

Want = tuple[BlockKey, int, Bytes, Bytes]
"""A frame: its key, its length in bytes, and where its header and its payload go (uint8 arrays whose sizes add up to the length)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Whom to talk to: `address` (host:port), the node and its incarnation that must be there, and how to prove who we are.

    `tls` None: in the clear. `tls_name`: whom the certificate must name, the host dialled if empty. `token`: "" for none.
    """

    address: str
    node_id: str
    incarnation: int
    tls: ssl.SSLContext | None = None
    tls_name: str = ""
    token: str = ""


class Line:
    """An open connection to `peer`, who has let us in; `arena_bytes` is the size of its arena.

    Raises `UnavailableError` (nobody there, or another node), `AccessError`, `LimitError`, `ProtocolError`, `DeadlineError`.
    """

    def __init__(self, peer: Peer, deadline_ns: int) -> None:
        self._stream = _dial(peer, deadline_ns)
        self._head = bytearray(wire.ANSWER.size)
        try:
            self._stream.send([wire.pack_hello(peer.node_id, peer.incarnation, peer.token)], deadline_ns)
            self._answer(0, wire.SIZE.size, deadline_ns)
            size = bytearray(wire.SIZE.size)
            self._stream.receive([size], deadline_ns)
        except BaseException:
            self.close()
            raise
        (self.arena_bytes,) = wire.SIZE.unpack(size)

    def probe(self, keys: Sequence[BlockKey], deadline_ns: int) -> bytes:
        """One byte a key, 1 where it can be read now. At most `MAX_COUNT` keys, at least one."""
        self._ask(wire.Kind.PROBE, len(keys), keys, deadline_ns)
        self._answer(len(keys), len(keys), deadline_ns)
        found = bytearray(len(keys))
        self._stream.receive([found], deadline_ns)
        return bytes(found)

    def get(self, wants: Sequence[Want], deadline_ns: int) -> list[bool]:
        """Fill the targets of the frames that are there, and say which are. At most `MAX_COUNT`, at least one."""
        table = wire.pack_wants([want[0] for want in wants], [want[1] for want in wants])
        self._ask(wire.Kind.GET, len(wants), [table], deadline_ns)
        count, follows = self._head_of_answer(deadline_ns)
        statuses = bytearray(len(wants) if count < len(wants) else 0)
        self._stream.receive([statuses], deadline_ns)
        here = [status == 1 for status in statuses] or [True] * len(wants)
        targets: list[Piece] = []
        length = 0
        for (_, nbytes, header, payload), found in zip(wants, here, strict=True):
            if found:
                targets += header.data, payload.data
                length += nbytes
        if count != sum(here) or follows != len(statuses) + length:
            raise ProtocolError(f"an answer about {count} frames with {follows} bytes, {sum(here)} and {length} would be right")
        self._stream.receive(targets, deadline_ns)
        return here

    def read(self, runs: Sequence[Run], into: Bytes, deadline_ns: int) -> None:
        """Fill `into`. At most `MAX_COUNT` runs, at least one."""
        self._ask(wire.Kind.READ, len(runs), [wire.pack_runs(runs)], deadline_ns)
        self._answer(len(runs), sum(run.length for run in runs), deadline_ns)
        view = into.data
        self._stream.receive([view[at : at + length] for _, length, at in runs], deadline_ns)

    def write(self, runs: Sequence[Run], source: Bytes, deadline_ns: int) -> None:
        """Send from `source`; the bytes are in the arena then. At most `MAX_COUNT` runs, at least one."""
        view = source.data
        pieces: list[Piece] = [wire.pack_runs(runs), *(view[at : at + length] for _, length, at in runs)]
        self._ask(wire.Kind.WRITE, len(runs), pieces, deadline_ns)
        self._answer(len(runs), 0, deadline_ns)

    def abort(self) -> None:
        """End the call under way, from any thread."""
        self._stream.abort()

    def close(self, *, reset: bool = True) -> None:
        """Hang up; what is on the way is dropped, unless the connection is another process's, too (`reset` False)."""
        self._stream.close(reset=reset)

    def _ask(self, kind: wire.Kind, count: int, pieces: Sequence[Piece], deadline_ns: int) -> None:
        self._stream.send([wire.pack_request(kind, count, ns_left(deadline_ns)), *pieces], deadline_ns)

    def _answer(self, count: int, nbytes: int, deadline_ns: int) -> None:
        """Take the head of an answer, which must be about `count` and have `nbytes`. Raises `ProtocolError`, and what was refused."""
        counted, follows = self._head_of_answer(deadline_ns)
        if (counted, follows) != (count, nbytes):
            raise ProtocolError(f"an answer about {counted} with {follows} bytes, {count} and {nbytes} would be right")

    def _head_of_answer(self, deadline_ns: int) -> tuple[int, int]:
        """Count, and the bytes that follow. Raises what the server refused with."""
        self._stream.receive([self._head], deadline_ns)
        status, count, nbytes = wire.unpack_answer(self._head)
        if status is not wire.Status.OK:
            text = bytearray(nbytes)
            self._stream.receive([text], deadline_ns)
            raise wire.refusal(status, text)
        return count, nbytes


def split(address: str) -> tuple[str, int]:
    """Host and port. Raises `ConfigError`."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"not an address: {address!r}; it is host:port")
    return host, int(port)


def _dial(peer: Peer, deadline_ns: int) -> Stream:
    check_deadline(deadline_ns)
    connection = _connect(*split(peer.address), deadline_ns)
    if peer.tls is None:
        return PlainStream(connection)
    return secure(connection, peer.tls, deadline_ns, peer.tls_name or split(peer.address)[0])


def _connect(host: str, port: int, deadline_ns: int) -> socket.socket:
    """The first of the host's addresses that answers."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnavailableError(f"{host} is not known: {error.strerror}") from None
    reason: OSError | None = None
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        try:
            size_buffers(connection, str(address[0]))
            connection.settimeout(seconds_left(deadline_ns) or 1e-6)
            connection.connect(address)
            tune(connection)
        except OSError as error:
            connection.close()
            reason = error
            continue
        return connection
    check_deadline(deadline_ns)
    raise UnavailableError(f"nobody at {host}:{port}: {reason.strerror or reason if reason else 'no address'}")
