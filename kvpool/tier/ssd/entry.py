"""What the log says of one record, byte for byte; the same bytes stand in a batch's header and again in its segment's footer.

All integers are little-endian. One entry::

    offset bytes field
         0     1 kind: 1 record, 2 tombstone
         1     1 flags: bit 0 there is a parent; the others zero
         2     2 tenant bytes, at most 255
         4     4 crc32c of the whole entry, padding included, but these four bytes
         8    32 key
        40    32 parent, zeros without
        72     8 xxh3_64 of the data
        80     8 expires, unix ms, 0 never
        88     4 offset of the data in the segment
        92     4 length of the data
        96     4 depth
       100     4 sequence
       104     8 the segment's sequence number
       112     - tenant, utf-8, then zeros to a multiple of 8

A tombstone has only a kind, a key and the segment's number; everything else is zero. There is one encoding of an entry, and no byte that a
decoder ignores: a flipped bit fails the crc32c, and what a good crc32c covers is checked for sense.
"""

import struct
from typing import Final, NamedTuple

import google_crc32c

from kvpool.block import KEY_BYTES, BlockKey
from kvpool.errors import ConfigError, FrameError

RECORD: Final = 1
TOMBSTONE: Final = 2
FIXED_BYTES: Final = 112
MAX_TENANT_BYTES: Final = 255
MAX_NUMBER: Final = (1 << 32) - 1
_FIXED: Final = struct.Struct("<BBHI32s32sQQIIIIQ")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = 4
_NO_KEY: Final = bytes(KEY_BYTES)


class LogEntry(NamedTuple):
    """A record or, with `kind` TOMBSTONE, the news that its key was removed. `offset` and `length` are bytes in the segment `segment`."""

    kind: int
    key: BlockKey
    segment: int
    parent: BlockKey | None = None
    checksum: int = 0
    expires_ms: int = 0
    offset: int = 0
    length: int = 0
    depth: int = 0
    sequence: int = 0
    tenant: bytes = b""


def entry_bytes(tenant: bytes) -> int:
    """Bytes of the entry of a record of this tenant."""
    return FIXED_BYTES + (len(tenant) + 7) // 8 * 8


def encode_entry(entry: LogEntry) -> bytes:
    """The bytes of `entry`, a multiple of 8. Raises `ConfigError` on a value the format can't hold."""
    try:
        fixed = _FIXED.pack(
            entry.kind, entry.parent is not None, len(entry.tenant), 0, entry.key, entry.parent or _NO_KEY, entry.checksum, entry.expires_ms,
            entry.offset, entry.length, entry.depth, entry.sequence, entry.segment,
        )  # fmt: skip
    except struct.error as error:
        raise ConfigError(f"a record's depth, sequence and length must be under 2**32 and its expiry under 2**64: {error}") from error
    raw = (fixed + entry.tenant).ljust(entry_bytes(entry.tenant), b"\0")
    return raw[:_CRC_AT] + _CRC.pack(_crc(raw)) + raw[_CRC_AT + 4 :]


def decode_entry(buf: memoryview, at: int = 0) -> tuple[LogEntry, int]:
    """The entry at `at` of `buf`, and where the next one begins. Raises `FrameError`."""
    if at + FIXED_BYTES > len(buf):
        raise FrameError(f"an entry has at least {FIXED_BYTES} bytes, {len(buf) - at} are left")
    (
        kind, flags, tenant_bytes, crc, key, parent, checksum, expires_ms, offset, length, depth, sequence, segment,
    ) = _FIXED.unpack_from(buf, at)  # fmt: skip
    end = at + FIXED_BYTES + (tenant_bytes + 7) // 8 * 8
    if tenant_bytes > MAX_TENANT_BYTES or end > len(buf):
        raise FrameError(f"an entry's tenant of {tenant_bytes} bytes goes past the end")
    raw = bytes(buf[at:end])
    if _crc(raw) != crc:
        raise FrameError("an entry's crc32c does not match")
    tenant = raw[FIXED_BYTES : FIXED_BYTES + tenant_bytes]
    entry = LogEntry(
        kind, BlockKey(key), segment, BlockKey(parent) if flags else None, checksum, expires_ms, offset, length, depth, sequence, tenant
    )
    _check(entry, flags, parent, raw[FIXED_BYTES + tenant_bytes :])
    return entry, end


def encode_tenant(tenant: str) -> bytes:
    """A tenant's name as the log keeps it. Raises `ConfigError` when it is too long."""
    raw = tenant.encode()
    if len(raw) > MAX_TENANT_BYTES:
        raise ConfigError(f"a tenant's name has at most {MAX_TENANT_BYTES} bytes of utf-8, got {len(raw)}")
    return raw


def _check(entry: LogEntry, flags: int, parent: bytes, padding: bytes) -> None:
    if entry.kind not in (RECORD, TOMBSTONE) or flags > 1 or any(padding):
        raise FrameError(f"an entry of kind {entry.kind} with flags {flags} is not known, or its padding is not zero")
    if not flags and parent != _NO_KEY:
        raise FrameError("an entry has a parent and says it has none")
    if entry.kind == TOMBSTONE and entry != LogEntry(TOMBSTONE, entry.key, entry.segment):
        raise FrameError("a tombstone says more than a key")
    if entry.kind == RECORD and (entry.length == 0 or entry.offset == 0):
        raise FrameError("a record without data")
    try:
        entry.tenant.decode()
    except UnicodeDecodeError as error:
        raise FrameError("an entry's tenant is not utf-8") from error


def _crc(raw: bytes) -> int:
    crc: int = google_crc32c.extend(google_crc32c.value(raw[:_CRC_AT]), raw[_CRC_AT + 4 :])
    return crc
