"""What lies where on a board, word for word: a header page, the tags, the records.

A board never leaves its host, so all words are 8 bytes in the host's byte order. Header, at byte 0:

    offset  bytes  field
         0      8  magic "KVPBOARD"
         8      8  format (1)
        16     16  node id
        32      8  incarnation
        40      8  buckets, a power of two
        48      8  tags offset
        56      8  records offset
        64      8  crc32c of bytes 0..64
       128      8  state: 1 live, 2 retired; changes, so outside the checksum

Tags: one word a bucket, four lanes of 16 bits, one for each slot of the bucket, lane 0 in the high bits. A lane holds the low 14 bits of
its key's first word; 0x4000 while nobody can find the slot. So one word tells where of four a key may be, and the top bit of a lane is free
for finding it: `(0x8000.. - (word ^ tag in each lane)) & 0x8000..` has a bit set for each equal lane, without a borrow between lanes.

Records: 64 bytes, one cache line each; slot `4 * bucket + lane`:

         0      8  generation: odd in flux or nobody's, even and above zero ready; 0 never used
         8      8  offset in the arena's data region
        16      8  length | flags << 48
        24      8  expires, monotonic ns; 2**64 - 1 never
        32     32  key

A key may lie in two buckets, which its second and third word choose (two-choice hashing); the emptier one gets it. With twice as many slots
as blocks there is always room but for about two blocks in a thousand at the worst, and a removed record leaves no tombstone.
"""

import os
import struct
import sys
from enum import IntEnum, IntFlag
from typing import Final, NamedTuple

import google_crc32c

from kvpool.errors import ConfigError, FrameError
from kvpool.tier.superblock import node_bytes

MAGIC: Final = b"KVPBOARD"
FORMAT: Final = 1
HEADER_BYTES: Final = 4096
RECORD_BYTES: Final = 64
WORD: Final = 8
BUCKET_SLOTS: Final = 4
MIN_BLOCK_BYTES: Final = 8192
"""Smaller blocks than this are not planned for: an arena full of them would have some that are not on its board."""

STATE_WORD: Final = 16
TAG_MASK: Final = 0x3FFF
NO_TAG: Final = 0x4000
LANES: Final = 0x0001_0001_0001_0001
HITS: Final = 0x8000_8000_8000_8000
LENGTH_BITS: Final = 48
LENGTH_MASK: Final = (1 << LENGTH_BITS) - 1
LANE_FLIP: Final = BUCKET_SLOTS - 1 if sys.byteorder == "little" else 0
"""Slot `n` has the 16 bits number `n ^ LANE_FLIP` of the tags."""
NEVER: Final = (1 << 64) - 1
KEY: Final = struct.Struct("4Q")
FIELDS: Final = struct.Struct("7Q")
"""A record without its generation: offset, length and flags, expires, the key's four words."""

_HEAD: Final = struct.Struct("8sQ16s4Q")
_CRC: Final = struct.Struct("Q")


class State(IntEnum):
    """Where the owner is in its life. One that is killed stays live."""

    LIVE = 1
    RETIRED = 2


class Flag(IntFlag):
    """What a reader must know of a block."""

    UNVERIFIED = 1
    """It crossed a wire or a disk and nobody has checked it yet: check the payload's checksum."""


class Shape(NamedTuple):
    """Whose board it is, and how large. `node_id` is 16 bytes."""

    node_id: bytes
    incarnation: int
    buckets: int

    @property
    def slots(self) -> int:
        """Records there is room for."""
        return self.buckets * BUCKET_SLOTS

    @property
    def tags_at(self) -> int:
        """Offset of the tags, bytes."""
        return HEADER_BYTES

    @property
    def records_at(self) -> int:
        """Offset of the records, bytes; a multiple of 64."""
        return HEADER_BYTES + max(RECORD_BYTES, self.buckets * WORD)

    @property
    def nbytes(self) -> int:
        """Bytes of the board, whole pages."""
        return -(-(self.records_at + self.slots * RECORD_BYTES) // 4096) * 4096


def board_slots(max_blocks: int, capacity: int) -> int:
    """Slots of a board for `max_blocks` blocks in an arena of `capacity` bytes: twice what is needed, rounded up to a power of two.

    At 66 bytes a slot that is 1.6 to 3.2 % of an arena full of 8 KiB blocks, and less in proportion for larger ones.
    """
    if max_blocks < 1 or capacity < 1:
        raise ConfigError("a board needs max_blocks and a capacity of at least 1")
    blocks = max(1, min(max_blocks, capacity // MIN_BLOCK_BYTES))
    return max(2 * BUCKET_SLOTS, 1 << (2 * blocks - 1).bit_length())


def shape_for(node_id: str, incarnation: int, max_blocks: int, capacity: int) -> Shape:
    """Raises `ConfigError` for an id that is none, an incarnation that is no 64-bit number, or no size."""
    if not 0 <= incarnation < 1 << 64:
        raise ConfigError("a board needs an incarnation of 64 bits")
    return Shape(node_bytes(node_id), incarnation, board_slots(max_blocks, capacity) // BUCKET_SLOTS)


def encode_header(shape: Shape) -> bytes:
    """The header before its state word."""
    head = _HEAD.pack(MAGIC, FORMAT, *shape, shape.tags_at, shape.records_at)
    return head + _CRC.pack(google_crc32c.value(head))


def decode_header(raw: bytes, nbytes: int) -> Shape:
    """Raises `FrameError` on a wrong magic, format or checksum, and on a shape that does not fit a board of `nbytes`."""
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        raise FrameError("not a board: wrong magic")
    _, version, node_id, incarnation, buckets, tags_at, records_at = _HEAD.unpack_from(raw)
    if version != FORMAT:
        raise FrameError(f"board format {version}, this build reads format {FORMAT}: run the same version on both sides")
    if _CRC.unpack_from(raw, _HEAD.size)[0] != google_crc32c.value(raw[: _HEAD.size]):
        raise FrameError("a board's header is damaged: wrong checksum")
    shape = Shape(node_id, incarnation, buckets)
    sound = buckets >= 2 and buckets & (buckets - 1) == 0 and (tags_at, records_at) == (shape.tags_at, shape.records_at)
    if not sound or shape.nbytes != nbytes:
        raise FrameError(f"a board's header can't be: {shape} in {nbytes} bytes")
    return shape


def page_of(descriptor: int) -> bytes:
    """The header page behind a descriptor, shorter when there is less."""
    return os.pread(descriptor, HEADER_BYTES, 0)
