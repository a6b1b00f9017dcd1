"""Tag-length-value lists: ``u16 tag, u16 length, value`` little-endian, one after the other.

Theory. The format grows by new tags. The tag's high bit tells an old reader what to do with one it doesn't know: set means
*must understand* (refuse the whole thing), clear means skip. Lengths are checked against what is there before a value is
touched, so a hostile length costs nothing.
"""

import struct
from collections.abc import Iterable, Iterator

from kvpool.errors import ConfigError, FrameError

MUST_UNDERSTAND = 0x8000
TLV_HEAD_BYTES = 4
_HEAD = struct.Struct("<HH")


def pack_tlvs(items: Iterable[tuple[int, bytes]]) -> bytes:
    """Bytes of `items` in the given order; `ConfigError` when a tag or a value's length does not fit in 16 bits."""
    parts: list[bytes] = []
    for tag, value in items:
        if not 0 <= tag <= 0xFFFF or len(value) > 0xFFFF:
            raise ConfigError(f"field {tag:#06x} of {len(value)} bytes does not fit: tags and lengths are 16 bits; shorten the value")
        parts.append(_HEAD.pack(tag, len(value)))
        parts.append(value)
    return b"".join(parts)


def iter_tlvs(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Fields of `data` in order; `FrameError` when a field reaches past the end."""
    at, end = 0, len(data)
    while at < end:
        if end - at < TLV_HEAD_BYTES:
            raise FrameError(f"{end - at} stray bytes after the last field")
        tag, length = _HEAD.unpack_from(data, at)
        at += TLV_HEAD_BYTES
        if length > end - at:
            raise FrameError(f"field {tag:#06x} says {length} bytes, only {end - at} are left")
        yield tag, data[at : at + length]
        at += length
