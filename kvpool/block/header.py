"""The header in front of every stored payload: what it says, byte for byte.

Theory. A frame is a header followed by the payload, the same bytes in memory, on disk and on the wire. The header begins
with 128 fixed bytes (little-endian, offsets below), goes on with tag-length-value fields, and is padded with zeros to a
multiple of 64 so that the payload keeps the frame's alignment::

      0 magic "KVPB"      4 u16 version        6 u16 header bytes     8 u32 flags
     12 key[32]          44 parent[32]        76 fingerprint[16]
     92 u16 layers       94 u16 block tokens  96 u16 tokens          98 u8 dtype       99 u8 layout
    100 u64 payload bytes                    108 u32 TLV bytes      112 12 zero bytes
    124 u32 crc32c of all header bytes but these four

Fields: LAYERS (run-length coded list of layers) and CHECKSUM (u16 algorithm, u64 value over the payload; 1 = xxh3_64) are
always there, in this order; unknown ones may follow and are skipped unless their tag says *must understand*. No field has
tag 0, so padding never reads as one.

There is exactly one encoding of a header's content, and no byte that a decoder ignores: any flipped bit fails the crc32c,
and whatever a good crc32c covers is checked again for sense, with lengths compared before anything is built from them.
"""

import enum
import struct
from dataclasses import dataclass

import google_crc32c

from kvpool.block.geometry import DTYPE_CODES, LAYOUT_LAYER_MAJOR, Geometry
from kvpool.block.identity import FINGERPRINT_BYTES, KEY_BYTES, BlockKey
from kvpool.block.layers import MAX_LAYERS, check_int, pack_layers, unpack_layers
from kvpool.block.tlv import MUST_UNDERSTAND, TLV_HEAD_BYTES, iter_tlvs, pack_tlvs
from kvpool.errors import ConfigError, FrameError

MAGIC = b"KVPB"
VERSION = 1
FIXED_BYTES = 128
HEADER_ALIGN = 64
MAX_HEADER_BYTES = 0xFFFF // HEADER_ALIGN * HEADER_ALIGN

KEY_AT, PARENT_AT, TOKENS_AT, PAYLOAD_BYTES_AT, CRC_AT = 12, 44, 96, 100, 124
"""Offsets of the fields that differ between the frames of one namespace."""

TAG_LAYERS = MUST_UNDERSTAND | 1
TAG_CHECKSUM = MUST_UNDERSTAND | 2
CHECKSUM_XXH3_64 = 1

FIXED = struct.Struct("<4sHHI32s32s16sHHHBBQI12sI")
CHECKSUM = struct.Struct("<HQ")
CRC = struct.Struct("<I")
_DTYPES = {code: name for name, code in DTYPE_CODES.items()}
_PADDING = bytes(HEADER_ALIGN)


class Flags(enum.IntFlag):
    """What a frame is. PURE excludes APPROX, DERIVED and SESSION, and one of the four is always set."""

    PURE = 1
    """A function of its key alone."""
    APPROX = 2
    """Computed from, or stored with, a loss."""
    DERIVED = 4
    """A function of more than the prefix (a selection, a region)."""
    SESSION = 8
    """Good for one session only."""
    HAS_SIDECAR = 16
    """Recomputable extra data comes with it."""
    PRE_ROPE = 32
    """K is stored before rotation."""


TAINTED = Flags.APPROX | Flags.DERIVED | Flags.SESSION
_KNOWN_FLAGS = int(TAINTED | Flags.PURE | Flags.HAS_SIDECAR | Flags.PRE_ROPE)


def check_flags(flags: int) -> Flags:
    """`flags` if they make sense together; `ConfigError` otherwise."""
    if flags & ~_KNOWN_FLAGS:
        raise ConfigError(f"unknown flags {flags & ~_KNOWN_FLAGS:#x}")
    if bool(flags & Flags.PURE) == bool(flags & TAINTED):
        raise ConfigError("a frame is either PURE or at least one of APPROX, DERIVED and SESSION")
    return Flags(flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """The content of one header.

    `key` and `parent` are 32 bytes (the parent of a chain's first block is the namespace root), `fingerprint` the 16 of
    `Namespace.fingerprint`; `n_tokens` is 1..block_tokens. `extra` are (tag, value) fields this version does not know and
    may skip. Raises `ConfigError`.
    """

    key: BlockKey
    parent: BlockKey
    fingerprint: bytes
    geometry: Geometry
    n_tokens: int
    payload_checksum: int
    flags: Flags = Flags.PURE
    extra: tuple[tuple[int, bytes], ...] = ()

    def __post_init__(self) -> None:
        for name, value, size in (
            ("key", self.key, KEY_BYTES),
            ("parent", self.parent, KEY_BYTES),
            ("fingerprint", self.fingerprint, FINGERPRINT_BYTES),
        ):
            if not isinstance(value, bytes) or len(value) != size:
                raise ConfigError(f"{name} must be {size} bytes, got {value!r}")
        check_int("n_tokens", self.n_tokens, 1, self.geometry.block_tokens)
        check_int("payload_checksum", self.payload_checksum, 0, (1 << 64) - 1)
        check_flags(self.flags)
        for tag, _ in self.extra:
            if not 1 <= tag < MUST_UNDERSTAND:
                raise ConfigError(f"extra field {tag:#06x} is not one a reader may skip; use a tag from 1 to {MUST_UNDERSTAND - 1:#x}")
        if self.header_bytes > MAX_HEADER_BYTES:
            raise ConfigError(f"a header of {self.header_bytes} bytes is too long, at most {MAX_HEADER_BYTES}; drop extra fields")

    @property
    def payload_bytes(self) -> int:
        """Bytes of the payload behind the header."""
        return self.geometry.payload_bytes(self.n_tokens)

    @property
    def header_bytes(self) -> int:
        """Bytes of the encoded header, a multiple of 64."""
        values = [pack_layers(self.geometry.layers), *(value for _, value in self.extra)]
        return _padded(FIXED_BYTES + sum(TLV_HEAD_BYTES + len(value) for value in values) + TLV_HEAD_BYTES + CHECKSUM.size)


def encode_header(header: FrameHeader) -> bytes:
    """The bytes of `header`. Slow and general; a worker uses a `Framer`."""
    geometry = header.geometry
    tlvs = pack_tlvs(
        (
            (TAG_LAYERS, pack_layers(geometry.layers)),
            (TAG_CHECKSUM, CHECKSUM.pack(CHECKSUM_XXH3_64, header.payload_checksum)),
            *header.extra,
        )
    )
    length = _padded(FIXED_BYTES + len(tlvs))
    fixed = FIXED.pack(
        MAGIC, VERSION, length, header.flags, header.key, header.parent, header.fingerprint,
        len(geometry.layers), geometry.block_tokens, header.n_tokens, DTYPE_CODES[geometry.dtype], LAYOUT_LAYER_MAJOR,
        header.payload_bytes, len(tlvs), bytes(12), 0,
    )  # fmt: skip
    body = tlvs + _PADDING[: length - FIXED_BYTES - len(tlvs)]
    return fixed[:CRC_AT] + CRC.pack(header_crc(fixed + body)) + body


def decode_header(buf: bytes | bytearray | memoryview) -> FrameHeader:
    """The header at the start of `buf`, which may go on behind it. Raises `FrameError`; never allocates by a stored length."""
    view = memoryview(buf)
    if view.nbytes < FIXED_BYTES:
        raise FrameError(f"a frame has at least {FIXED_BYTES} bytes, got {view.nbytes}")
    fixed = FIXED.unpack_from(view)
    magic, version, length, flags, key, parent, fingerprint, n_layers, block_tokens, n_tokens, dtype, layout, payload, used, zero, crc = (
        fixed
    )
    if magic != MAGIC:
        raise FrameError(f"not a frame: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"frame version {version} is not known, this is version {VERSION}")
    if length % HEADER_ALIGN or not FIXED_BYTES <= length <= view.nbytes:
        raise FrameError(f"header length {length} is not a multiple of {HEADER_ALIGN} within the {view.nbytes} bytes given")
    raw = bytes(view[:length])
    if header_crc(raw) != crc:
        raise FrameError("header crc32c does not match")
    if length != _padded(FIXED_BYTES + used) or any(raw[FIXED_BYTES + used :]) or any(zero):
        raise FrameError("padding of the header is not the shortest, or not zero")
    if dtype not in _DTYPES or layout != LAYOUT_LAYER_MAJOR or not 1 <= n_layers <= MAX_LAYERS:
        raise FrameError(f"dtype {dtype}, layout {layout} or {n_layers} layers are not known")
    layers, checksum, extra = _fields(raw[FIXED_BYTES : FIXED_BYTES + used])
    try:
        geometry = Geometry(unpack_layers(layers), block_tokens, _DTYPES[dtype])
        header = FrameHeader(
            key=key, parent=parent, fingerprint=fingerprint, geometry=geometry, n_tokens=n_tokens,
            payload_checksum=checksum, flags=check_flags(flags), extra=extra,
        )  # fmt: skip
    except ConfigError as error:
        raise FrameError(f"header makes no sense: {error}") from None
    if len(geometry.layers) != n_layers or header.payload_bytes != payload:
        raise FrameError(f"{n_layers} layers and {payload} payload bytes don't fit the list of layers in the header")
    return header


def header_crc(header: bytes) -> int:
    """crc32c over all bytes of an encoded header but the four that hold it."""
    crc: int = google_crc32c.extend(google_crc32c.value(header[:CRC_AT]), header[FIXED_BYTES:])
    return crc


def _fields(tlvs: bytes) -> tuple[bytes, int, tuple[tuple[int, bytes], ...]]:
    """LAYERS, the payload's checksum, and the fields that may be skipped."""
    fields = list(iter_tlvs(tlvs))
    if [tag for tag, _ in fields[:2]] != [TAG_LAYERS, TAG_CHECKSUM]:
        raise FrameError("header does not begin with the fields LAYERS and CHECKSUM")
    for tag, _ in fields[2:]:
        if tag & MUST_UNDERSTAND:
            raise FrameError(f"field {tag:#06x} must be understood and is not, or comes twice; read this frame with a newer version")
    layers, checksum = fields[0][1], fields[1][1]
    if len(checksum) != CHECKSUM.size:
        raise FrameError(f"a checksum field takes {CHECKSUM.size} bytes, got {len(checksum)}")
    algorithm, value = CHECKSUM.unpack(checksum)
    if algorithm != CHECKSUM_XXH3_64:
        raise FrameError(f"payload checksum algorithm {algorithm} is not known")
    return layers, value, tuple(fields[2:])


def _padded(length: int) -> int:
    return (length + HEADER_ALIGN - 1) // HEADER_ALIGN * HEADER_ALIGN
