"""The first page of an arena file: what it is, whose it is, how big it is.

    offset  bytes  field
         0      8  magic "KVPARENA"
         8      4  format version (1)
        12      4  zero
        16     16  node id
        32      8  incarnation
        40      8  capacity, bytes of the data region
        48      8  data offset: where the data region starts in the file
        56      4  crc32c of bytes 0..56
        60   4036  zero

All integers are little-endian.
"""

import struct
from dataclasses import dataclass
from typing import Final

import google_crc32c

from kvpool.errors import ConfigError, FrameError

MAGIC: Final = b"KVPARENA"
FORMAT: Final = 1
SUPERBLOCK_BYTES: Final = 4096
_BODY: Final = struct.Struct("<8sII16sQQQ")
_CHECK: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Superblock:
    """Identity and shape of one arena. `node_id` is 16 bytes; sizes are bytes; `data_offset` is a multiple of the page size."""

    node_id: bytes
    incarnation: int
    capacity: int
    data_offset: int = SUPERBLOCK_BYTES

    def __post_init__(self) -> None:
        if len(self.node_id) != 16 or not 0 <= self.incarnation < 1 << 64 or self.capacity <= 0:
            raise ConfigError("an arena needs a 16-byte node id, an incarnation of 64 bits and a capacity above zero")

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_offset + self.capacity

    def encode(self) -> bytes:
        """The page, `SUPERBLOCK_BYTES` long."""
        body = _BODY.pack(MAGIC, FORMAT, 0, self.node_id, self.incarnation, self.capacity, self.data_offset)
        return (body + _CHECK.pack(google_crc32c.value(body))).ljust(SUPERBLOCK_BYTES, b"\0")


def decode_superblock(page: bytes) -> Superblock:
    """The superblock in `page`. Raises `FrameError` on a short page, wrong magic, version or checksum, or values that can't be."""
    if len(page) != SUPERBLOCK_BYTES:
        raise FrameError(f"not an arena: the first page has {len(page)} bytes of {SUPERBLOCK_BYTES}")
    magic, version, zero, node_id, incarnation, capacity, data_offset = _BODY.unpack_from(page)
    if magic != MAGIC:
        raise FrameError("not an arena: wrong magic")
    if version != FORMAT:
        raise FrameError(f"arena format {version}, this build reads format {FORMAT}: run the same version on both sides")
    body, rest = page[: _BODY.size], page[_BODY.size + _CHECK.size :]
    if _CHECK.unpack_from(page, _BODY.size)[0] != google_crc32c.value(body) or zero or rest.strip(b"\0"):
        raise FrameError("arena superblock is damaged: wrong checksum")
    if capacity <= 0 or data_offset < SUPERBLOCK_BYTES or data_offset % SUPERBLOCK_BYTES:
        raise FrameError(f"arena superblock can't be: capacity {capacity}, data offset {data_offset}")
    return Superblock(node_id=node_id, incarnation=incarnation, capacity=capacity, data_offset=data_offset)


def node_bytes(node_id: str) -> bytes:
    """The 16 bytes of a node's hex id. Raises `ConfigError`."""
    try:
        raw = bytes.fromhex(node_id)
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raise ConfigError(f"not a node id: {node_id!r}; it is 32 hexadecimal digits, as uuid4().hex gives")
    return raw
