"""Frames that say what they are, cheap enough to make and to check by the million.

Theory. A real frame carries its key and checksums of its header and payload (`kvpool.block.frame`), and a reader takes it only if both are
right. These frames obey the same rule with one checksum over everything::

     0 u64 xxh3_64 of all that follows     8 key[32]     40 u64 salt     48 payload, the salt repeated

The *salt* is new for every write, so two writes of one key differ in every word of the payload. A mixture of two writes, or of a frame
and what lay there before, can't pass. The judge knows more than a reader: from key, length and salt it makes the only right bytes.
"""

import struct

import xxhash

from kvpool.block import BlockKey

HEADER_BYTES = 48
_HEAD = struct.Struct("<32sQ")
_SUM = struct.Struct("<Q")
_digest = xxhash.xxh3_64_intdigest


def make_frame(key: BlockKey, length: int, salt: int) -> bytes:
    """The frame of `key` with `length` >= 48 bytes as the write numbered `salt` makes it."""
    words, rest = divmod(length - HEADER_BYTES, 8)
    word = (salt * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little")
    body = _HEAD.pack(key, salt) + word * words + word[:rest]
    return _SUM.pack(_digest(body)) + body


def opens(frame: bytes, key: BlockKey) -> bool:
    """Whether a reader who wants `key` may take these bytes."""
    return frame[8:40] == key and _SUM.unpack_from(frame)[0] == _digest(frame[8:])


def is_exact(frame: bytes, key: BlockKey, length: int) -> bool:
    """Whether these are the bytes that some write of `key` made: what only the judge can say."""
    return len(frame) == length and frame == make_frame(key, length, int.from_bytes(frame[40:48], "little"))
