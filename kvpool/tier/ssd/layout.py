"""A segment file, byte for byte: a header page, batches, and at its very end a footer that names everything in it.

All integers are little-endian, everything begins on a page of 4096 bytes, unused bytes are zero::

    page 0               segment header
    then, back to back   batches: header (entries, padded to whole pages), then the data of its records
    ...                  unused
    last pages but one   footer: a copy of all entries, padded to whole pages
    last page            trailer, which says where the footer is

    segment header       0 magic "KVPSSEG1"   8 u64 log id  16 u64 segment number  24 u64 incarnation  32 u64 segment bytes  40 u32 crc32c
    batch header         0 magic "KVPSBAT1"   8 u64 log id  16 u64 segment number  24 u64 offset of this batch  32 u64 batch bytes
                        40 u64 written, unix ms  48 u32 entries  52 u32 bytes of the entries  56 u32 crc32c of 0..56  60 u32 zero
                        64 the entries
    trailer              0 magic "KVPSTRL1"   8 u64 log id  16 u64 segment number  24 u64 offset of the footer  32 u64 bytes of the entries
                        40 u64 where the next batch would begin  48 u64 written, unix ms  56 u32 entries  60 u32 crc32c of the entries
                        64 u32 flags: bit 0 sealed, nothing follows  68 u32 crc32c of 0..68

The log id is drawn when the log is made and the segment number rises with every (re)use of a file, so what a file held before its present
use never passes for its content. An entry carries its own crc32c, so a damaged entry costs one record and not its batch. Data of a page
or more begins on a page; smaller data begins at a multiple of 64 and shares pages.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import google_crc32c

from kvpool.errors import FrameError
from kvpool.tier.ssd.disk import PAGE
from kvpool.tier.ssd.entry import LogEntry, decode_entry

SEGMENT_MAGIC: Final = b"KVPSSEG1"
BATCH_MAGIC: Final = b"KVPSBAT1"
TRAILER_MAGIC: Final = b"KVPSTRL1"
BATCH_FIXED: Final = 64
SMALL_ALIGN: Final = 64
SEALED: Final = 1
_SEGMENT: Final = struct.Struct("<8sQQQQ")
_BATCH: Final = struct.Struct("<8sQQQQQII")
_TRAILER: Final = struct.Struct("<8sQQQQQQIII")
_CRC: Final = struct.Struct("<I")


class SegmentHeader(NamedTuple):
    """The first page of a segment in use."""

    log_id: int
    number: int
    incarnation: int
    segment_bytes: int


class BatchHeader(NamedTuple):
    """What a group commit wrote: `batch_bytes` from `offset` of the segment on, header included."""

    log_id: int
    number: int
    offset: int
    batch_bytes: int
    written_ms: int
    entries: int
    entries_bytes: int


class Trailer(NamedTuple):
    """Where a segment's footer is; batches may follow from `tail` on unless it is sealed."""

    log_id: int
    number: int
    footer_offset: int
    entries_bytes: int
    tail: int
    written_ms: int
    entries: int
    entries_crc: int
    flags: int

    @property
    def sealed(self) -> bool:
        """Nothing was written behind `tail`."""
        return bool(self.flags & SEALED)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where things may stand in a segment of `segment_bytes` (a multiple of `PAGE`)."""

    segment_bytes: int

    @property
    def first(self) -> int:
        """Where the first batch begins."""
        return PAGE

    @property
    def trailer(self) -> int:
        """Where the trailer is."""
        return self.segment_bytes - PAGE

    def room(self, tail: int, footer_bytes: int) -> int:
        """Bytes a batch may take at `tail` when the footer has `footer_bytes` of entries by then."""
        return self.trailer - pages(footer_bytes) - tail


def pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def place(at: int, length: int) -> int:
    """Where data of `length` bytes begins at or behind `at`."""
    align = PAGE if length >= PAGE else SMALL_ALIGN
    return -(-at // align) * align


def encode_segment(header: SegmentHeader) -> bytes:
    """The first page of a segment."""
    return _sealed_page(_SEGMENT.pack(SEGMENT_MAGIC, *header))


def decode_segment(page: bytes) -> SegmentHeader:
    """The header in the first page. Raises `FrameError`."""
    return SegmentHeader._make(_open_page(page, _SEGMENT, SEGMENT_MAGIC, "segment header"))


def encode_batch(header: BatchHeader, entries: Sequence[bytes]) -> bytes:
    """The header pages of a batch."""
    fixed = _BATCH.pack(BATCH_MAGIC, *header)
    raw = b"".join((fixed, _CRC.pack(google_crc32c.value(fixed)), bytes(4), *entries))
    return raw.ljust(pages(len(raw)), b"\0")


def decode_batch(page: bytes | memoryview) -> BatchHeader:
    """The fixed part of a batch's header, from its first page on. Raises `FrameError`."""
    view = memoryview(page)
    if len(view) < PAGE:
        raise FrameError(f"a batch header begins with a page of {PAGE} bytes, got {len(view)}")
    magic, *fields = _BATCH.unpack_from(view)
    crc, zero = struct.unpack_from("<II", view, _BATCH.size)
    if magic != BATCH_MAGIC:
        raise FrameError("no batch begins here")
    if google_crc32c.value(bytes(view[: _BATCH.size])) != crc or zero:
        raise FrameError("batch header crc32c does not match")
    header = BatchHeader._make(fields)
    if header.batch_bytes % PAGE or header.batch_bytes < pages(BATCH_FIXED + header.entries_bytes) or header.offset % PAGE:
        raise FrameError("a batch header's sizes can't be")
    return header


def decode_entries(raw: memoryview, count: int) -> tuple[list[LogEntry], int]:
    """The good ones of `count` entries that stand back to back in `raw`, and how many are damaged.

    A damaged entry is skipped where its length can still be told from the next good one behind it: entries begin at multiples of 8.
    """
    good: list[LogEntry] = []
    at = 0
    while at < len(raw) and len(good) < count:
        try:
            entry, at = decode_entry(raw, at)
        except FrameError:
            at += 8
            continue
        good.append(entry)
    return good, count - len(good)


def encode_footer(
    entries: Sequence[bytes], *, log_id: int, number: int, geometry: Geometry, tail: int, written_ms: int, sealed: bool
) -> tuple[int, bytes]:
    """Footer and trailer as one run of bytes to the end of the segment, and the offset where it begins."""
    body = b"".join(entries)
    offset = geometry.trailer - pages(len(body))
    trailer = Trailer(log_id, number, offset, len(body), tail, written_ms, len(entries), google_crc32c.value(body), SEALED if sealed else 0)
    return offset, body.ljust(pages(len(body)), b"\0") + _sealed_page(_TRAILER.pack(TRAILER_MAGIC, *trailer))


def decode_trailer(page: bytes, geometry: Geometry) -> Trailer:
    """The trailer in the last page of a segment. Raises `FrameError`."""
    trailer = Trailer._make(_open_page(page, _TRAILER, TRAILER_MAGIC, "trailer"))
    at, size = trailer.footer_offset, pages(trailer.entries_bytes)
    if at < geometry.first or at + size != geometry.trailer or not geometry.first <= trailer.tail <= at or trailer.tail % PAGE:
        raise FrameError("a trailer's offsets can't be")
    return trailer


def decode_footer(raw: memoryview, trailer: Trailer) -> list[LogEntry]:
    """All entries of a footer. Raises `FrameError` when anything in it is wrong."""
    body = raw[: trailer.entries_bytes]
    if len(body) != trailer.entries_bytes or google_crc32c.value(bytes(body)) != trailer.entries_crc:
        raise FrameError("footer crc32c does not match")
    entries, damaged = decode_entries(body, trailer.entries)
    if damaged:
        raise FrameError(f"{damaged} entries of a footer are damaged")
    return entries


def _sealed_page(body: bytes) -> bytes:
    return (body + _CRC.pack(google_crc32c.value(body))).ljust(PAGE, b"\0")


def _open_page(page: bytes, shape: struct.Struct, magic: bytes, what: str) -> tuple[int, ...]:
    if len(page) != PAGE:
        raise FrameError(f"a {what} is one page of {PAGE} bytes, got {len(page)}")
    found, *fields = shape.unpack_from(page)
    if found != magic:
        raise FrameError(f"no {what} here")
    (crc,) = _CRC.unpack_from(page, shape.size)
    if google_crc32c.value(page[: shape.size]) != crc or any(page[shape.size + 4 :]):
        raise FrameError(f"{what} crc32c does not match")
    return tuple(fields)
