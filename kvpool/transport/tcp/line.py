"""One connection of a client: dial, say hello, ask and take the answer. One thread at a time; `lines.py` sees to that.

Answers go where they belong at once: the head, and after it all frames or runs. A GET takes its answer as if all frames were there, so that
one call to the kernel brings head and frame of a small one; where some are not, what has come is put right. Frames are looked at as they
come, a few at a time: their bytes are in the processor's cache then, and the sender goes on meanwhile.

A line that has raised is of no more use, because nobody knows how much of an answer is still on the way.
"""

import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from kvpool.block import BlockKey
from kvpool.clock import seconds_left
from kvpool.errors import ConfigError, ProtocolError, UnavailableError
from kvpool.transport.reach import Bytes, Run, check_deadline
from kvpool.transport.tcp import wire
from kvpool.transport.tcp.stream import Piece, PlainStream, Stream, ns_left, size_buffers, tune, without
from kvpool.transport.tcp.tls import secure
from kvpool.units import KIB

Want = tuple[BlockKey, int, Bytes, Bytes]
"""A frame: its key, its length in bytes, and where its header and its payload go (uint8 arrays whose sizes add up to the length)."""

Check = Callable[[int], bool]
"""Whether the frame that has come for the want at a position is what it should be."""
_STEP_BYTES: Final = 512 * KIB
"""Received before they are looked at."""


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
        self._ask(wire.Kind.PROBE, len(keys), [b"".join(keys)], deadline_ns)
        self._answer(len(keys), len(keys), deadline_ns)
        found = bytearray(len(keys))
        self._stream.receive([found], deadline_ns)
        return bytes(found)

    def get(self, wants: Sequence[Want], deadline_ns: int, check: Check) -> list[bool]:
        """Fill the targets of the frames that are there, and say which are and pass `check`. At most `MAX_COUNT`, at least one."""
        table = wire.pack_wants([want[0] for want in wants], [want[1] for want in wants])
        self._ask(wire.Kind.GET, len(wants), [table], deadline_ns)
        head, rows = self._head, [target.data for want in wants for target in want[2:]]
        came = self._stream.receive_some([memoryview(head), *rows], len(head), deadline_ns) - len(head)
        status, count, follows = wire.unpack_answer(head)
        if status is not wire.Status.OK:
            self._refused(status, follows, _first(rows, came), deadline_ns)
        good = [True] * len(wants)
        if count < len(wants):
            good, came = self._put_right(rows, came, deadline_ns)
        told = len(wants) if count < len(wants) else 0
        length = sum(want[1] for want, here in zip(wants, good, strict=True) if here)
        if count != sum(good) or follows != told + length:
            raise ProtocolError(f"an answer about {count} frames with {follows} bytes, {sum(good)} and {told + length} would be right")
        self._take_frames(wants, rows, good, came, deadline_ns, check)
        return good

    def _put_right(self, rows: Sequence[memoryview], came: int, deadline_ns: int) -> tuple[list[bool], int]:
        """Not all frames are here, and `came` bytes of the answer lie where they would belong if they were.

        Which are here, and how many of their bytes have come; these lie at the beginning of the targets of those that are here.
        """
        early = memoryview(_first(rows, came))
        statuses = bytearray(len(rows) // 2)
        count = min(len(early), len(statuses))
        statuses[:count] = early[:count]
        self._stream.receive([memoryview(statuses)[count:]], deadline_ns)
        early, good = early[count:], [status == 1 for status in statuses]
        left = early
        for index, row in enumerate(rows):
            if good[index // 2]:
                size = min(len(row), len(left))
                row[:size], left = left[:size], left[size:]
        if left:
            raise ProtocolError("an answer is longer than the frames that it says are here")
        return good, len(early)

    def _take_frames(
        self, wants: Sequence[Want], rows: Sequence[memoryview], good: list[bool], came: int, deadline_ns: int, check: Check
    ) -> None:
        """Receive the frames that are `good`, of which `came` bytes are there, and mark those that fail their check as not good."""
        some: list[int] = []
        pieces: list[Piece] = []
        size = 0
        here = [number for number, there in enumerate(good) if there]
        for number in here:
            some.append(number)
            pieces += rows[2 * number : 2 * number + 2]
            size += wants[number][1]
            if size >= _STEP_BYTES or number == here[-1]:
                if came < size:
                    self._stream.receive(without(pieces, came) if came else pieces, deadline_ns)
                came = max(0, came - size)
                for done in some:
                    good[done] = check(done)
                some, pieces, size = [], [], 0

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
            self._refused(status, nbytes, b"", deadline_ns)
        return count, nbytes

    def _refused(self, status: wire.Status, nbytes: int, text: bytes, deadline_ns: int) -> NoReturn:
        """Raise what the server says in `nbytes`, of which `text` has come."""
        rest = bytearray(max(0, nbytes - len(text)))
        self._stream.receive([rest], deadline_ns)
        raise wire.refusal(status, text[:nbytes] + rest)


def _first(pieces: Sequence[memoryview], count: int) -> bytes:
    """The first `count` bytes of `pieces`."""
    taken = bytearray()
    for piece in pieces:
        if len(taken) < count:
            taken += piece[: count - len(taken)]
    return bytes(taken)


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
