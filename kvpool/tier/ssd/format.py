"""The bytes of the log: the superblock, a segment's first page, and groups of records.

Theory. A *group* is what one put writes and one sync makes durable: a header that describes its items, then their data. A group stands at
a page and says which segment, which place in it and which life of the log it belongs to; so a page left over from an earlier use of the
room, or one that a disk wrote to the wrong place, is never taken for one that belongs there. Data of a page or more start at a page,
smaller ones at 64 bytes, right behind the header. A *tombstone* says that a record is dead that may still lie in an older segment.

    superblock, twice 4096 bytes       segment page, 4096 bytes           group header
    0   8  magic "KVPSSDLG"            0   8  magic "KVPSEGMT"            0   8  magic "KVPGROUP"
    8   4  format version (1)          8   4  format version (1)          8   2  format version (1)
    12  4  zero                        12  4  zero                        10  2  flags: 1 = the segment ends here
    16  8  incarnation (life)          16  8  serial                      12  4  number of items
    24  8  bytes of a segment          24  8  life                        16  8  serial of the segment
    32  4  crc32c of bytes 0..32       32  8  bytes of the segment        24  8  life of the log
    36     zero                        40  4  crc32c of bytes 0..40       32  8  offset of this header in the segment
                                       44     zero                        40  8  bytes of the group, padding included
    record item, 120 bytes + tenant    tombstone item, 48 bytes           48  4  bytes of this header: 56 + items
    0   1  kind 1                      0   1  kind 2                      52  4  crc32c of all other bytes of this header
    1   1  1: has a parent             1   3  zero                        56     items
    2   2  bytes of the tenant         4   4  before: offset
    4   4  data, from group start      8   8  before: serial
    8   8  length of the data          16 32  key
    16  8  depth, tokens
    24  8  expires, unix ms, 0 never
    32  8  sequence, tokens
    40  8  ms left till it expires, when written; 0 never
    48  8  xxh3_64 of the data
    56 32  key
    88 32  parent, zero without
    120    tenant, utf-8

All integers are little-endian. A tombstone kills records of its key at or before the place (serial, offset of the data).
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

import google_crc32c

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, FrameError
from kvpool.tier.ssd.disk import PAGE

FORMAT: Final = 1
SMALL_ALIGN: Final = 64
"""Data shorter than a page start at a multiple of this, others at a page."""
MAX_TENANT_BYTES: Final = 1024
MAX_SEGMENT_BYTES: Final = 1 << 30
GROUP_MAGIC: Final = b"KVPGROUP"
SEAL: Final = 1
"""Group flag: no group follows in this segment."""

_SUPER_MAGIC: Final = b"KVPSSDLG"
_SEGMENT_MAGIC: Final = b"KVPSEGMT"
_SUPER: Final = struct.Struct("<8sIIQQ")
_SEGMENT: Final = struct.Struct("<8sIIQQQ")
_GROUP: Final = struct.Struct("<8sHHIQQQQII")
_RECORD: Final = struct.Struct("<BBHIQQQQQQ32s32s")
_TOMB: Final = struct.Struct("<BBHIQ32s")
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = _GROUP.size - _CRC.size
_RECORD_KIND, _TOMB_KIND = 1, 2
_NO_PARENT = bytes(32)

MAX_HEADER_BYTES: Final = 1 << 20
"""No group header is longer."""


class Place(NamedTuple):
    """Where a record's data start: the serial of the segment and the byte in it. Later places are larger."""

    serial: int
    offset: int


class RecordItem(NamedTuple):
    """A record as its group describes it. `at`: where its data start, in bytes from the group's start; `checksum`: xxh3_64 of them;
    `ttl_ms`: how long it had to live when it was written, whatever the clock says later, 0 for ever."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    length: int
    expires_ms: int
    sequence: int
    tenant: str
    at: int
    checksum: int
    ttl_ms: int = 0


class Tombstone(NamedTuple):
    """Records of `key` at or before `before` are dead."""

    key: BlockKey
    before: Place


class Group(NamedTuple):
    """A group's header. `offset` and `total` are bytes, both multiples of a page."""

    serial: int
    life: int
    offset: int
    total: int
    records: tuple[RecordItem, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    flags: int = 0


class SegmentPage(NamedTuple):
    """A segment's first page."""

    serial: int
    life: int
    segment_bytes: int


class Super(NamedTuple):
    """What the superblock holds."""

    incarnation: int
    segment_bytes: int


def up(length: int, align: int) -> int:
    """`length` rounded up to a multiple of `align`."""
    return -(-length // align) * align


def data_align(length: int) -> int:
    """Where data of `length` bytes may start."""
    return PAGE if length >= PAGE else SMALL_ALIGN


def item_bytes(tenant: str) -> int:
    """Bytes of a record item in a header. Raises `ConfigError` for a tenant that is too long."""
    extra = len(tenant.encode())
    if extra > MAX_TENANT_BYTES:
        raise ConfigError(f"a tenant's name takes at most {MAX_TENANT_BYTES} bytes, got {extra}")
    return _RECORD.size + extra


def header_bytes(tenants: Sequence[str], tombstones: int) -> int:
    """Bytes of a group header with a record for each of `tenants` and so many tombstones."""
    return _GROUP.size + sum(item_bytes(tenant) for tenant in tenants) + tombstones * _TOMB.size


def encode_group(group: Group) -> bytes:
    """The header's bytes, not padded. Raises `ConfigError` for numbers that don't fit."""
    parts = [_encode_record(item) for item in group.records]
    parts += [_TOMB.pack(_TOMB_KIND, 0, 0, tomb.before.offset, tomb.before.serial, tomb.key) for tomb in group.tombstones]
    items, count = b"".join(parts), len(parts)
    fixed = _GROUP.pack(
        GROUP_MAGIC, FORMAT, group.flags, count, group.serial, group.life, group.offset, group.total, _GROUP.size + len(items), 0
    )
    crc = google_crc32c.extend(google_crc32c.value(fixed[:_CRC_AT]), items)
    return fixed[:_CRC_AT] + _CRC.pack(crc) + items


def group_header_bytes(page: bytes) -> int:
    """How many bytes the header that begins with `page` has, so a reader knows how much to read. Raises `FrameError`."""
    if len(page) < _GROUP.size:
        raise FrameError("not a group: too short")
    magic, version, _, _, _, _, _, _, length, _ = _GROUP.unpack_from(page)
    if magic != GROUP_MAGIC:
        raise FrameError("not a group: wrong magic")
    if version != FORMAT or not _GROUP.size <= length <= MAX_HEADER_BYTES:
        raise FrameError(f"group of format {version} with a header of {length} bytes")
    return int(length)


def decode_group(raw: bytes) -> Group:
    """The group whose header is `raw`, exactly. Raises `FrameError` on anything that can't be."""
    if group_header_bytes(raw) != len(raw):
        raise FrameError(f"a group header of {len(raw)} bytes says it has {group_header_bytes(raw)}")
    _, _, flags, count, serial, life, offset, total, length, crc = _GROUP.unpack_from(raw)
    items = raw[_GROUP.size :]
    if google_crc32c.extend(google_crc32c.value(raw[:_CRC_AT]), items) != crc:
        raise FrameError("crc32c of a group header does not match")
    if flags & ~SEAL or offset % PAGE or total % PAGE or total < length or offset + total > MAX_SEGMENT_BYTES:
        raise FrameError(f"a group of {total} bytes at {offset} with flags {flags} can't be")
    records: list[RecordItem] = []
    tombstones: list[Tombstone] = []
    at = 0
    for _ in range(count):
        kind = items[at] if at < len(items) else 0
        if kind == _RECORD_KIND and len(items) - at >= _RECORD.size:
            item, size = _decode_record(items, at)
            if item.at < length or item.at + item.length > total or not item.length:
                raise FrameError("a record lies outside its group")
            records.append(item)
        elif kind == _TOMB_KIND and len(items) - at >= _TOMB.size:
            _, _, _, before_offset, before_serial, key = _TOMB.unpack_from(items, at)
            tombstones.append(Tombstone(BlockKey(key), Place(before_serial, before_offset)))
            size = _TOMB.size
        else:
            raise FrameError(f"item of kind {kind} in a group header")
        at += size
    if at != len(items):
        raise FrameError("items of a group header don't fill it")
    return Group(serial, life, offset, total, tuple(records), tuple(tombstones), flags)


def encode_segment(page: SegmentPage) -> bytes:
    """`PAGE` bytes."""
    return _page(_SEGMENT.pack(_SEGMENT_MAGIC, FORMAT, 0, *page))


def decode_segment(page: bytes) -> SegmentPage:
    """Raises `FrameError`."""
    _, _, _, serial, life, size = _unpage(_SEGMENT, _SEGMENT_MAGIC, page)
    return SegmentPage(serial, life, size)


def encode_super(block: Super) -> bytes:
    """`PAGE` bytes."""
    return _page(_SUPER.pack(_SUPER_MAGIC, FORMAT, 0, *block))


def decode_super(page: bytes) -> Super:
    """Raises `FrameError`."""
    _, _, _, incarnation, size = _unpage(_SUPER, _SUPER_MAGIC, page)
    return Super(incarnation, size)


def _encode_record(item: RecordItem) -> bytes:
    tenant = item.tenant.encode()
    try:
        return (
            _RECORD.pack(
                _RECORD_KIND, item.parent is not None, len(tenant), item.at, item.length, item.depth, item.expires_ms,
                item.sequence, item.ttl_ms, item.checksum, item.key, item.parent or _NO_PARENT,
            )
            + tenant
        )  # fmt: skip
    except struct.error as error:
        raise ConfigError(f"a record's numbers must be below 2**64: {error}") from None


def _decode_record(items: bytes, start: int) -> tuple[RecordItem, int]:
    _, has_parent, extra, at, length, depth, expires_ms, sequence, ttl_ms, checksum, key, parent = _RECORD.unpack_from(items, start)
    end = start + _RECORD.size + extra
    if has_parent > 1 or end > len(items) or extra > MAX_TENANT_BYTES or bool(expires_ms) != bool(ttl_ms):
        raise FrameError("a record item can't be")
    try:
        tenant = items[start + _RECORD.size : end].decode()
    except UnicodeDecodeError:
        raise FrameError("a tenant's name is not utf-8") from None
    above = BlockKey(parent) if has_parent else None
    return RecordItem(BlockKey(key), above, depth, length, expires_ms, sequence, tenant, at, checksum, ttl_ms), end - start


def _page(body: bytes) -> bytes:
    return (body + _CRC.pack(google_crc32c.value(body))).ljust(PAGE, b"\0")


def _unpage(layout: struct.Struct, wanted: bytes, page: bytes) -> tuple[int, ...]:
    if len(page) != PAGE:
        raise FrameError(f"a page has {PAGE} bytes, got {len(page)}")
    fields = layout.unpack_from(page)
    body, rest = page[: layout.size], page[layout.size + _CRC.size :]
    if fields[0] != wanted or fields[1] != FORMAT or fields[2]:
        raise FrameError(f"not a page of kind {wanted.decode()}, format {FORMAT}")
    if _CRC.unpack_from(page, layout.size)[0] != google_crc32c.value(body) or any(rest):
        raise FrameError(f"a page of kind {wanted.decode()} is damaged: wrong checksum")
    return fields
