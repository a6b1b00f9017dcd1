"""What crosses a connection of the TCP data plane, byte for byte.

Theory. All numbers are little-endian. A connection begins with one HELLO, which says whom the client wants to talk to; the server answers
it as it answers everything else. Then the client asks and the server answers, one at a time::

    HELLO     4 magic "KVPT"   u16 version    u16 token bytes   u64 incarnation   16 node id     then the token
    REQUEST   u8 kind          3 zero bytes   u32 count         u64 deadline, us from now        then the table
    ANSWER    u8 status        3 zero bytes   u32 count         u64 bytes that follow

    kind      table                                   after it                an answer's bytes
    PROBE     count keys of 32                                                count bytes, 1: readable now
    GET       count keys of 32, count u64 lengths                             unless all are here, count bytes, 1: here; then their frames
    READ      count x (u64 offset, u64 length)                                the runs, in order
    WRITE     count x (u64 offset, u64 length)        the runs, in order      none; the bytes are in the arena

An answer's count is that of the request, but of a GET how many frames are here. The answer to a HELLO holds the size of the arena (u64).
Any status but OK is followed by a text for people, and by the end of the connection. So is whatever a server doesn't understand: there is
no way to find the next request in a stream that broke its rules.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final

from kvpool.errors import AccessError, ConfigError, LimitError, ProtocolError, RemoteError, UnavailableError
from kvpool.transport.reach import Run
from kvpool.units import MIB, SECOND

MAGIC: Final = b"KVPT"
VERSION: Final = 1
KEY_BYTES: Final = 32
NODE_BYTES: Final = 16
MAX_COUNT: Final = 4096
"""Keys or runs of one request."""
MAX_TOKEN_BYTES: Final = 512
MAX_TEXT_BYTES: Final = 512
MAX_DEADLINE_NS: Final = 20 * SECOND
"""A server works no longer on one request. It is less than the time for which a node keeps what late writers may still write to."""
BATCH_BYTES: Final = 64 * MIB
"""A client asks for no more bytes at once (but for one larger frame), so that slow networks stay below `MAX_DEADLINE_NS`."""

HELLO: Final = struct.Struct("<4sHHQ16s")
REQUEST: Final = struct.Struct("<B3sIQ")
ANSWER: Final = struct.Struct("<B3sIQ")
SIZE: Final = struct.Struct("<Q")
_RUN: Final = struct.Struct("<QQ")
_ZEROS: Final = bytes(3)


class Kind(IntEnum):
    """What is asked."""

    PROBE = 1
    GET = 2
    READ = 3
    WRITE = 4


class Status(IntEnum):
    """How it went."""

    OK = 0
    STRANGER = 1  # no token, a wrong one, or one without the right
    FULL = 2  # too many connections
    ELSEWHERE = 3  # another node, or another life of it
    BROKEN = 4  # the request breaks the protocol


ROW_BYTES: Final = {Kind.PROBE: KEY_BYTES, Kind.GET: KEY_BYTES + 8, Kind.READ: 16, Kind.WRITE: 16}
"""Of a request's table, per key or run."""

_KINDS: Final = {int(kind): kind for kind in Kind}  # an enum's own look-up is slow
_STATUSES: Final = {int(status): status for status in Status}
_ERRORS: Final[dict[Status, type[RemoteError]]] = {
    Status.STRANGER: AccessError,
    Status.FULL: LimitError,
    Status.ELSEWHERE: UnavailableError,
    Status.BROKEN: ProtocolError,
}


def node_bytes(node_id: str) -> bytes:
    """The 16 bytes of a node's hex id. Raises `ConfigError`."""
    try:
        raw = bytes.fromhex(node_id)
    except ValueError:
        raw = b""
    if len(raw) != NODE_BYTES:
        raise ConfigError(f"not a node id: {node_id!r}; it is 32 hexadecimal digits")
    return raw


def pack_hello(node_id: str, incarnation: int, token: str) -> bytes:
    """A client's first words. Raises `ConfigError`."""
    said = token.encode()
    if len(said) > MAX_TOKEN_BYTES:
        raise ConfigError(f"a token has at most {MAX_TOKEN_BYTES} bytes")
    return HELLO.pack(MAGIC, VERSION, len(said), incarnation, node_bytes(node_id)) + said


def unpack_hello(head: bytes | bytearray) -> tuple[bytes, int, int]:
    """The node, its incarnation and the bytes of the token that follows. Raises `ProtocolError`."""
    magic, version, token_bytes, incarnation, node = HELLO.unpack(head)
    if magic != MAGIC:
        raise ProtocolError("this port speaks kvpool's data plane and nothing else")
    if version != VERSION:
        raise ProtocolError(f"version {version} of the data plane is not spoken here, {VERSION} is")
    if token_bytes > MAX_TOKEN_BYTES:
        raise ProtocolError(f"a token has at most {MAX_TOKEN_BYTES} bytes")
    return node, incarnation, token_bytes


def pack_request(kind: Kind, count: int, left_ns: int) -> bytes:
    """The head of a request that may take `left_ns` from now."""
    return REQUEST.pack(kind, _ZEROS, count, max(1, left_ns // 1000))


def unpack_request(head: bytes | bytearray | memoryview) -> tuple[Kind, int, int]:
    """Kind, count and the nanoseconds that the server may take, capped. Raises `ProtocolError`."""
    kind, zeros, count, deadline_us = REQUEST.unpack(head)
    asked = _KINDS.get(kind)
    if asked is None or zeros != _ZEROS:
        raise ProtocolError(f"no such request: {kind}")
    if not 0 < count <= MAX_COUNT:
        raise ProtocolError(f"a request has 1 to {MAX_COUNT} keys or runs, this one {count}")
    if not deadline_us:
        raise ProtocolError("a request without time can't be answered")
    return asked, count, min(deadline_us * 1000, MAX_DEADLINE_NS)


def pack_answer(count: int, nbytes: int) -> bytes:
    """The head of an answer to a request that went well."""
    return ANSWER.pack(Status.OK, _ZEROS, count, nbytes)


def pack_refusal(status: Status, why: str) -> bytes:
    """The last words of a server."""
    text = why.encode()[:MAX_TEXT_BYTES]
    return ANSWER.pack(status, _ZEROS, 0, len(text)) + text


def unpack_answer(head: bytes | bytearray) -> tuple[Status, int, int]:
    """Status, count and the bytes that follow. Raises `ProtocolError`."""
    status, zeros, count, nbytes = ANSWER.unpack(head)
    told = _STATUSES.get(status)
    if told is None or zeros != _ZEROS:
        raise ProtocolError(f"no such answer: {status}")
    if told is not Status.OK and nbytes > MAX_TEXT_BYTES:
        raise ProtocolError(f"a refusal of {nbytes} bytes")
    return told, count, nbytes


def refusal(status: Status, text: bytes | bytearray) -> RemoteError:
    """A server's last words, to raise."""
    return _ERRORS[status](text.decode(errors="replace"))


def pack_runs(runs: Sequence[Run]) -> bytes:
    """The table of a READ or a WRITE."""
    return struct.pack(f"<{2 * len(runs)}Q", *(number for run in runs for number in run[:2]))


def unpack_runs(table: bytes | bytearray, arena_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of each run. Raises `ProtocolError` unless all lie in the arena."""
    runs: list[tuple[int, int]] = list(_RUN.iter_unpack(table))
    if any(offset + length > arena_bytes for offset, length in runs):
        raise ProtocolError(f"a run is outside an arena of {arena_bytes} bytes")
    return runs


def pack_wants(keys: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """The table of a GET."""
    return b"".join(keys) + struct.pack(f"<{len(lengths)}Q", *lengths)


def unpack_wants(table: bytes | bytearray, count: int) -> tuple[bytes, tuple[int, ...]]:
    """The keys, joined, and the lengths of their frames."""
    return bytes(table[: count * KEY_BYTES]), struct.unpack_from(f"<{count}Q", table, count * KEY_BYTES)


def batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """The non-empty runs as requests: at most `MAX_COUNT` runs and `BATCH_BYTES` bytes each, longer runs cut."""
    batch: list[Run] = []
    room = BATCH_BYTES
    for offset, length, at in runs:
        done = 0
        while done < length:
            if not room or len(batch) == MAX_COUNT:
                yield batch
                batch, room = [], BATCH_BYTES
            step = min(length - done, room)
            batch.append(Run(offset + done, step, at + done))
            done, room = done + step, room - step
    if batch:
        yield batch
