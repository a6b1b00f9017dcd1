"""One connection at the server: let the client in, then answer one request after the other. One thread each.

Frames and runs go from the arena to the socket and back without a copy in between. What breaks the protocol, comes too late, or isn't
taken in time ends the connection; a write that has missed its deadline must, because its bytes would otherwise go on arriving.

A client that has given up has reset its connection, yet what it sent before may still lie in the socket's buffer. So a write looks first
whether its client is still there: a server that was stopped for a while must not begin with what is long over.
"""

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.clock import seconds_left
from kvpool.errors import AccessError, DeadlineError, ProtocolError, UnavailableError
from kvpool.transport.reach import Bytes
from kvpool.transport.tcp import wire
from kvpool.transport.tcp.index import Index
from kvpool.transport.tcp.stream import NEVER_NS, Stream
from kvpool.units import SECOND

HELLO_NS: Final = 5 * SECOND
"""How long a stranger may hold a connection."""
_FAREWELL_NS: Final = SECOND
_RECHECK_NS: Final = SECOND
_START_BYTES: Final = 4096
"""Read at once: of most requests everything, of a write what comes with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served: the arena of node `node_id` in its life `incarnation`, and the index of its frames."""

    node_id: str
    incarnation: int
    arena: Bytes
    index: Index


class Admit(Protocol):
    """Who may come in."""

    def __call__(self, token: str) -> None:
        """Raise `AccessError` unless the bearer of `token` ("" for none) may read and write the whole arena."""
        ...


class _Refusal(Exception):
    """The client is told why, and that is all it gets."""

    def __init__(self, status: wire.Status, why: str) -> None:
        super().__init__(why)
        self.status = status


class Serving:
    """The talk with one client over `stream`. `full`: why there is no room for it, "" when there is."""

    def __init__(self, stream: Stream, served: Served, admit: Admit, full: str) -> None:
        self._stream = stream
        self._served = served
        self._arena = served.arena.data
        self._admit = admit
        self._full = full
        self._token = ""
        self._admitted_ns = 0
        self._start = bytearray(_START_BYTES)
        self._watch = select.poll()
        self._watch.register(stream.descriptor, select.POLLRDHUP)
        self._kinds: dict[wire.Kind, Callable[[bytearray, memoryview, int, int], None]] = {
            wire.Kind.PROBE: self._probe,
            wire.Kind.GET: self._get,
            wire.Kind.READ: self._read,
            wire.Kind.WRITE: self._write,
        }

    def talk(self) -> str:
        """Until the client had to be refused, and was told why: that is returned. Raises `DeadlineError`, or `UnavailableError` once it has
        hung up."""
        try:
            self._welcome(time.monotonic_ns() + HELLO_NS)
            while True:
                self._answer()
        except AccessError as error:
            return self._refuse(wire.Status.STRANGER, str(error))
        except ProtocolError as error:
            return self._refuse(wire.Status.BROKEN, str(error))
        except _Refusal as refusal:
            return self._refuse(refusal.status, str(refusal))

    def _welcome(self, deadline_ns: int) -> None:
        head = bytearray(wire.HELLO.size)
        self._stream.receive([head], deadline_ns)
        node, incarnation, token_bytes = wire.unpack_hello(head)
        token = bytearray(token_bytes)
        self._stream.receive([token], deadline_ns)
        self._token = token.decode(errors="replace")
        self._check()
        served = self._served
        if (node, incarnation) != (wire.node_bytes(served.node_id), served.incarnation):
            why = f"here is node {served.node_id[:8]} in its life {served.incarnation}, not the one that was asked for"
            raise _Refusal(wire.Status.ELSEWHERE, why)
        if self._full:
            raise _Refusal(wire.Status.FULL, self._full)
        self._stream.send([wire.pack_answer(0, wire.SIZE.size), wire.SIZE.pack(served.arena.size)], deadline_ns)

    def _answer(self) -> None:
        start, head = memoryview(self._start), wire.REQUEST.size
        start = start[: self._stream.receive_some([start], head, NEVER_NS)]
        now_ns = time.monotonic_ns()
        kind, count, may_take_ns = wire.unpack_request(start[:head])
        if now_ns - self._admitted_ns > _RECHECK_NS:
            self._check()
        deadline_ns, table_bytes = now_ns + may_take_ns, count * wire.ROW_BYTES[kind]
        table, rest = bytearray(start[head : head + table_bytes]), start[head + table_bytes :]
        if len(table) < table_bytes:
            missing = bytearray(table_bytes - len(table))
            self._stream.receive([missing], deadline_ns)
            table += missing
        if rest and kind is not wire.Kind.WRITE:
            raise ProtocolError("a request came before the last one was answered")
        self._kinds[kind](table, rest, count, deadline_ns)

    def _check(self) -> None:
        """Whether the token still counts."""
        self._admit(self._token)
        self._admitted_ns = time.monotonic_ns()

    def _probe(self, table: bytearray, rest: memoryview, count: int, deadline_ns: int) -> None:
        self._stream.send([wire.pack_answer(count, count), self._served.index.probe(bytes(table))], deadline_ns)

    def _get(self, table: bytearray, rest: memoryview, count: int, deadline_ns: int) -> None:
        keys, lengths = wire.unpack_wants(table, count)
        taken = self._served.index.take(keys, lengths)
        try:
            places = taken.places
            told = taken.statuses if len(places) < count else b""
            head = wire.pack_answer(len(places), len(told) + sum(length for _, length in places))
            self._stream.send([head, told, *self._views(places)], deadline_ns)
        finally:
            taken.release()

    def _read(self, table: bytearray, rest: memoryview, count: int, deadline_ns: int) -> None:
        runs = wire.unpack_runs(table, self._served.arena.size)
        self._stream.send([wire.pack_answer(count, sum(length for _, length in runs)), *self._views(runs)], deadline_ns)

    def _write(self, table: bytearray, rest: memoryview, count: int, deadline_ns: int) -> None:
        runs = wire.unpack_runs(table, self._served.arena.size)
        if self._watch.poll(0):
            raise UnavailableError("the client of a write has gone")
        views = self._views(runs)
        if len(rest) > sum(map(len, views)):
            raise ProtocolError("more bytes than the runs of a write have")
        for index, view in enumerate(views):  # what came with the table
            there = min(len(view), len(rest))
            view[:there], views[index], rest = rest[:there], view[there:], rest[there:]
            if not rest:
                break
        self._stream.receive(views, deadline_ns)
        if not seconds_left(deadline_ns):
            raise DeadlineError("a write came too late")
        self._stream.send([wire.pack_answer(count, 0)], deadline_ns)

    def _views(self, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        arena = self._arena
        return [arena[offset : offset + length] for offset, length in places]

    def _refuse(self, status: wire.Status, why: str) -> str:
        self._stream.send([wire.pack_refusal(status, why)], time.monotonic_ns() + _FAREWELL_NS)
        return why
