"""What a client and a node on the same host say to each other over a session: one message a packet, all of them fixed binary.

Theory. A session is a UNIX socket that keeps packets whole (SOCK_SEQPACKET). The client asks, the node answers, in order, one answer a
request. Integers are little-endian. The first packet each way is a greeting, which names the version and whom it is meant for:

    offset  bytes  greeting
         0      8  magic "KVPSESS\\0"
         8      2  version
        10      2  0; in an answer 1 when the node refuses
        12      4  bytes of the text after the greeting
        16     16  node id
        32      8  incarnation
        40         text, UTF-8: the client's name; in an answer why the node refuses

With its greeting the client passes one descriptor, its cell; with its answer the node passes one, its board. The layout of the greeting
stays what it is in every version. After it:

    offset  bytes  request                                   answer
         0      1  kind                                      kind of the request
         1      1  1: near copies                            1: waiting; 2: refused, and a text follows
         2      2  blocks or keys that follow                outcomes that follow
         4      2  bytes of the tenant's name                bytes of the text (of 4)
         6      2  core that it is sent from + 1, 0: unsaid
         8      8  lease                                     lease
        16      8  tokens of the whole prompt, 0: unknown    offset of a slab
        24      8  bytes of the (next) slab, 0: none         bytes of a slab, 0: none
        32         tenant's name, then blocks or keys        outcomes: a byte each; then in answer to RESERVE an offset each

A block takes 104 bytes: key, parent (32 each, zeros for none), depth, length, ttl_ms, priority_ms (8 each), priority, whether it has a
parent (1 each), 6 zeros. What isn't said of a kind of message is zero. `decode_request` believes nothing.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from kvpool.errors import ConfigError, ProtocolError
from kvpool.request.pool import Outcome, Reservation
from kvpool.wire.fence import NodeIdentity

VERSION: Final = 2
MAX_BLOCKS: Final = 1024
"""Blocks or keys of one message."""
MAX_TEXT: Final = 1024
"""Bytes of a name or a reason."""

_MAGIC: Final = b"KVPSESS\0"
_GREETING: Final = struct.Struct("<8sHHI16sQ")
_HEAD: Final = struct.Struct("<BBHHHQQQ")
_ANSWER: Final = struct.Struct("<BBHIQQQ")
_BLOCK: Final = struct.Struct("<32s32sQQQQBB6s")
_KEY: Final = struct.Struct("32s")
_ZEROS: Final = bytes(6)
_NO_PARENT: Final = bytes(32)
_MAX_MS: Final = 1 << 43
"""As nanoseconds it still fits 63 bits."""
_MAX_COUNT: Final = 1 << 63
_NEAR, _WAITING, _REFUSED = 1, 1, 2
_MAX_OUTCOME: Final = max(Outcome)

MAX_MESSAGE: Final = _HEAD.size + MAX_TEXT + MAX_BLOCKS * _BLOCK.size
"""Bytes of the longest packet."""
MAX_ANSWER: Final = _ANSWER.size + max(MAX_TEXT, 9 * MAX_BLOCKS)
"""Bytes of the longest answer."""


class Kind(IntEnum):
    """What is asked. SLAB: room in advance; PUT: publish what was written to a slab's front; the rest as in `PoolRpc`."""

    SLAB = 2
    PUT = 3
    RESERVE = 4
    COMMIT = 5
    RELEASE = 6


class _Form(NamedTuple):
    """What a kind of request says: `lacks` are places of head fields that are zero, of (flags, name, lease, sequence, nbytes)."""

    kind: Kind
    lacks: tuple[int, ...]
    item: struct.Struct | None


_FORMS: Final = {
    form.kind: form
    for form in (
        _Form(Kind.SLAB, (0, 1, 2, 3), None),
        _Form(Kind.PUT, (0,), _BLOCK),
        _Form(Kind.RESERVE, (2, 4), _BLOCK),
        _Form(Kind.COMMIT, (0, 1, 3, 4), _KEY),
        _Form(Kind.RELEASE, (0, 1, 3, 4), _KEY),
    )
}


class Greeting(NamedTuple):
    """The first packet, either way. `text`: the client's name; from a node that refuses, why."""

    node: NodeIdentity
    text: str = ""
    refused: bool = False


class Request(NamedTuple):
    """One call; `nbytes`: of the slab that is asked for; `core`: that the caller is on, -1 when it doesn't know."""

    kind: Kind
    lease_id: int = 0
    sequence: int = 0
    nbytes: int = 0
    near: bool = False
    tenant: str = ""
    blocks: Sequence[Reservation] = ()
    keys: Sequence[bytes] = ()
    core: int = -1


class Answer(NamedTuple):
    """One answer. `outcomes`: `kvpool.request.pool.Outcome` a block, or 1 a key that was committed; `offsets`: of a RESERVE.

    `lease_id`, `slab_offset`, `slab_bytes`: what was granted. `refused`: why nothing was done.
    """

    lease_id: int = 0
    slab_offset: int = 0
    slab_bytes: int = 0
    outcomes: bytes = b""
    offsets: Sequence[int] = ()
    waiting: bool = False
    refused: str = ""


def encode_greeting(greeting: Greeting) -> bytes:
    """Spell a greeting; a text too long is cut."""
    text = greeting.text.encode()[:MAX_TEXT]
    node_id, incarnation = greeting.node
    return _GREETING.pack(_MAGIC, VERSION, greeting.refused, len(text), bytes.fromhex(node_id), incarnation) + text


def decode_greeting(data: bytes) -> Greeting:
    """Read a greeting. Raises `ProtocolError`, also for another version than ours."""
    if len(data) < _GREETING.size or not data.startswith(_MAGIC):
        raise ProtocolError("not a greeting of a session")
    _, version, refused, length, node_id, incarnation = _GREETING.unpack_from(data)
    if version != VERSION:
        raise ProtocolError(f"version {version} of sessions is spoken there, {VERSION} here: run the same version on both sides")
    if refused > 1 or length > MAX_TEXT or len(data) != _GREETING.size + length:
        raise ProtocolError("a greeting of the wrong length or with unknown flags")
    text = data[_GREETING.size :].decode(errors="replace")
    return Greeting(NodeIdentity(node_id.hex(), incarnation), text, bool(refused))


def encode_request(request: Request) -> bytes:
    """Spell a request. Raises `ConfigError` for what can't be spelled."""
    kind, lease_id, sequence, nbytes, near, tenant, blocks, keys, core = request
    name, count = tenant.encode(), len(blocks) or len(keys)
    if count > MAX_BLOCKS or len(name) > MAX_TEXT:
        raise ConfigError(f"a session's message takes {MAX_BLOCKS} blocks and a tenant's name of {MAX_TEXT} bytes at most; split the call")
    try:
        head = _HEAD.pack(kind, near, count, len(name), core + 1, lease_id, sequence, nbytes)
        tail = [_spell(*block) for block in blocks] if blocks else [_checked(key) for key in keys]
    except struct.error as error:
        raise ConfigError(f"a message of a session can't say that: {error}") from error
    return b"".join((head, name, *tail))


def _spell(key: bytes, parent: bytes, depth: int, length: int, ttl_ms: int, priority: int, priority_ms: int) -> bytes:
    above = _checked(parent) if parent else _NO_PARENT
    return _BLOCK.pack(_checked(key), above, depth, length, ttl_ms, priority_ms, priority, bool(parent), _ZEROS)


def _checked(key: bytes) -> bytes:
    if len(key) != _KEY.size:
        raise ConfigError(f"a block key has {_KEY.size} bytes, got {len(key)}")
    return key


def decode_request(data: bytes) -> Request:
    """Read a request. Raises `ProtocolError` for anything that `encode_request` doesn't make."""
    if len(data) < _HEAD.size:
        raise ProtocolError(f"a request of {len(data)} bytes")
    kind, flags, count, name_bytes, core, lease_id, sequence, nbytes = _HEAD.unpack_from(data)
    form = _FORMS.get(kind)
    if form is None:
        raise ProtocolError(f"a request of unknown kind {kind}")
    said = (flags, name_bytes, lease_id, sequence, nbytes)
    if flags > _NEAR or any(map(said.__getitem__, form.lacks)):
        raise ProtocolError(f"a request of kind {kind} with fields it doesn't have")
    item, start = form.item, _HEAD.size + name_bytes
    end = start + count * (item.size if item is not None else len(data) + 1)  # without items: no count but 0
    if count > MAX_BLOCKS or name_bytes > MAX_TEXT or len(data) != end:
        raise ProtocolError(f"a request of kind {kind} and {len(data)} bytes for {count} blocks")
    if max(sequence, nbytes) >= _MAX_COUNT:
        raise ProtocolError("a request with numbers beyond all bounds")
    try:
        tenant = data[_HEAD.size : start].decode()
    except UnicodeDecodeError as error:
        raise ProtocolError("a tenant's name that is not UTF-8") from error
    body = data[start:]
    blocks = _blocks(body) if item is _BLOCK else ()
    keys = [key for (key,) in _KEY.iter_unpack(body)] if item is _KEY else ()
    return Request(form.kind, lease_id, sequence, nbytes, bool(flags), tenant, blocks, keys, core - 1)


def _blocks(body: bytes) -> Sequence[Reservation]:
    """Blocks as they are spelled; what can't be is looked for in all of them at once."""
    rows = list(_BLOCK.iter_unpack(body))
    if not rows:
        return ()
    _, parents, depths, lengths, ttls_ms, priorities_ms, _, have_parents, zeros = zip(*rows, strict=True)
    if max(map(max, (depths, lengths))) >= _MAX_COUNT or max(map(max, (ttls_ms, priorities_ms))) >= _MAX_MS:
        raise ProtocolError("a block with numbers beyond all bounds")
    without = [parent for parent, has in zip(parents, have_parents, strict=True) if not has]
    if max(have_parents) > 1 or set(zeros) != {_ZEROS} or not {_NO_PARENT}.issuperset(without):
        raise ProtocolError("a block with fields it doesn't have")
    return [
        Reservation(key, parent if has_parent else b"", depth, length, ttl_ms, priority, priority_ms)
        for key, parent, depth, length, ttl_ms, priority_ms, priority, has_parent, _ in rows
    ]


def encode_answer(kind: Kind, answer: Answer) -> bytes:
    """Spell the answer to a request of that kind; a text too long is cut."""
    lease_id, offset, nbytes, outcomes, offsets, waiting, refused = answer
    if refused:
        text = refused.encode()[:MAX_TEXT]
        return _ANSWER.pack(kind, _REFUSED, 0, len(text), 0, 0, 0) + text
    head = _ANSWER.pack(kind, _WAITING if waiting else 0, len(outcomes), 0, lease_id, offset, nbytes)
    return head + outcomes + struct.pack(f"<{len(offsets)}Q", *offsets) if offsets else head + outcomes


def decode_answer(request: Request, data: bytes) -> Answer:
    """Read the answer to `request`. Raises `ProtocolError` when it isn't one, `ConfigError` when the node refused."""
    if len(data) < _ANSWER.size:
        raise ProtocolError(f"an answer of {len(data)} bytes")
    kind, flags, count, text_bytes, lease_id, offset, nbytes = _ANSWER.unpack_from(data)
    body = data[_ANSWER.size :]
    if kind != request.kind:
        raise ProtocolError(f"an answer of kind {kind} to a request of kind {request.kind}")
    if flags == _REFUSED and len(body) == text_bytes:
        raise ConfigError(body.decode(errors="replace"))
    wanted = 0 if kind in (Kind.SLAB, Kind.RELEASE) else len(request.blocks) or len(request.keys)
    each = 9 if kind == Kind.RESERVE else 1
    if flags > _WAITING or text_bytes or count != wanted or len(body) != count * each or max(body[:count], default=0) > _MAX_OUTCOME:
        raise ProtocolError(f"an answer of kind {kind} with {count} outcomes in {len(data)} bytes to {wanted}")
    offsets = struct.unpack(f"<{count}Q", body[count:]) if each > 1 else ()
    return Answer(lease_id, offset, nbytes, body[:count], offsets, bool(flags))
