"""The log's own identity: one file of two pages, of which the newer sound one counts.

    offset bytes field (little-endian, each page)
         0     8 magic "KVPSSUP1"
         8     8 generation, one higher with every write
        16     8 log id, drawn when the log is made
        24     8 segment bytes
        32     8 incarnation of the last node that opened the log
        40     8 time of this write, unix ms
        48     4 crc32c of 0..48, then zeros

A write goes to the page of the older generation and is synced, so a torn write leaves the other page as it was.
"""

import struct
from typing import Final, NamedTuple

import google_crc32c

from kvpool.errors import FrameError
from kvpool.tier.ssd.disk import PAGE

NAME: Final = "superblock"
MAGIC: Final = b"KVPSSUP1"
FILE_BYTES: Final = 2 * PAGE
_BODY: Final = struct.Struct("<8sQQQQQ")
_CRC: Final = struct.Struct("<I")


class LogSuperblock(NamedTuple):
    """One page of the file."""

    generation: int
    log_id: int
    segment_bytes: int
    incarnation: int
    written_ms: int

    @property
    def offset(self) -> int:
        """The page this generation is written to."""
        return self.generation % 2 * PAGE


def encode_superblock(block: LogSuperblock) -> bytes:
    """The page."""
    body = _BODY.pack(MAGIC, *block)
    return (body + _CRC.pack(google_crc32c.value(body))).ljust(PAGE, b"\0")


def decode_superblock(page: bytes) -> LogSuperblock:
    """The superblock in one page. Raises `FrameError`."""
    if len(page) != PAGE:
        raise FrameError(f"a superblock is one page of {PAGE} bytes, got {len(page)}")
    magic, *fields = _BODY.unpack_from(page)
    (crc,) = _CRC.unpack_from(page, _BODY.size)
    if magic != MAGIC or google_crc32c.value(page[: _BODY.size]) != crc or any(page[_BODY.size + 4 :]):
        raise FrameError("superblock damaged: wrong magic or crc32c")
    return LogSuperblock._make(fields)


def newest(pages: bytes) -> LogSuperblock | None:
    """The sound page with the higher generation, of the file's two; None when neither is sound."""
    found: list[LogSuperblock] = []
    for start in (0, PAGE):
        try:
            found.append(decode_superblock(pages[start : start + PAGE]))
        except FrameError:
            continue
    return max(found, default=None)
