"""The general header codec: what a tool sees, and what a hostile writer can't get past it."""

import struct
from dataclasses import replace
from typing import Any

import google_crc32c
import pytest

from kvpool.block import BlockKey, Flags, FrameHeader, Geometry, LayerSpec, decode_header, encode_header
from kvpool.block.tlv import pack_tlvs
from kvpool.errors import ConfigError, FrameError

GEOMETRY = Geometry((LayerSpec("full", 1, 2, 2),), 4, "float16")
HEADER = FrameHeader(
    key=BlockKey(b"k" * 32), parent=BlockKey(b"p" * 32), fingerprint=b"f" * 16, geometry=GEOMETRY, n_tokens=3, payload_checksum=5
)
LAYERS = (0x8001, struct.pack("<HHHHHI", 1, 1, 1, 2, 2, 0))
CHECKSUM = (0x8002, struct.pack("<HQ", 1, 5))


def signed(tlvs: bytes, *, patch: tuple[int, bytes] = (0, b""), pad: int | None = None) -> bytes:
    """A header with these fields and a good crc32c, whatever it says."""
    length = -(-(128 + len(tlvs)) // 64) * 64 if pad is None else pad
    raw = bytearray(encode_header(HEADER)[:128] + tlvs + bytes(max(0, length - 128 - len(tlvs))))
    struct.pack_into("<H", raw, 6, length)
    struct.pack_into("<I", raw, 108, len(tlvs))
    raw[patch[0] : patch[0] + len(patch[1])] = patch[1]
    struct.pack_into("<I", raw, 124, google_crc32c.value(bytes(raw[:124] + raw[128:])))
    return bytes(raw)


def test_signed_honest_fields_decode() -> None:
    """The forger of this file is right when it tells the truth, so its lies below fail for their own sake."""
    assert decode_header(signed(pack_tlvs([LAYERS, CHECKSUM]))) == HEADER


def test_decode_header_unknown_field_without_high_bit_is_skipped() -> None:
    """Newer writers may add what older readers can ignore; a tool still sees it and can write it back."""
    raw = signed(pack_tlvs([LAYERS, CHECKSUM, (0x0100, b"who"), (0x7FFF, b"")]))
    header = decode_header(raw)
    assert header.extra == ((0x0100, b"who"), (0x7FFF, b""))
    assert encode_header(header) == raw


@pytest.mark.parametrize("tag", [0x8003, 0xFFFF, 0x8001, 0x8002, 0x8000])
def test_decode_header_unknown_field_with_high_bit_is_refused(tag: int) -> None:
    """Must-understand means refuse; so does a known field that comes twice."""
    with pytest.raises(FrameError, match="must be understood"):
        decode_header(signed(pack_tlvs([LAYERS, CHECKSUM, (tag, b"")])))


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        (signed(b""), "LAYERS and CHECKSUM"),
        (signed(pack_tlvs([LAYERS])), "LAYERS and CHECKSUM"),
        (signed(pack_tlvs([CHECKSUM, LAYERS])), "LAYERS and CHECKSUM"),
        (signed(pack_tlvs([LAYERS, (0x8002, b"")])), "checksum field"),
        (signed(pack_tlvs([LAYERS, (0x8002, struct.pack("<HQ", 2, 5))])), "algorithm 2"),
        (signed(pack_tlvs([(0x8001, struct.pack("<HHHHHI", 65535, 1, 1, 2, 2, 0)), CHECKSUM])), "at most 1024"),
        (signed(pack_tlvs([(0x8001, struct.pack("<HHHHHI", 2, 1, 1, 2, 2, 0)), CHECKSUM])), "don't fit"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(100, struct.pack("<Q", 2**63))), "payload bytes don't fit"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(108, struct.pack("<I", 2**32 - 1))), "padding"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(108, struct.pack("<I", 36))), "tag from 1"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(112, b"\x01")), "padding"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(170, b"\x01")), "padding"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), pad=256), "padding"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]) + b"\x01"), "stray"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]) + b"\x01\x00\xff\xff"), "65535"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(96, struct.pack("<H", 0))), "n_tokens"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(96, struct.pack("<H", 5))), "n_tokens"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(94, struct.pack("<H", 513))), "block_tokens"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(8, struct.pack("<I", 3))), "PURE"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(8, struct.pack("<I", 0))), "PURE"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(8, struct.pack("<I", 1 | 64))), "unknown flags"),
        (signed(pack_tlvs([LAYERS, CHECKSUM]), patch=(4, struct.pack("<H", 2))), "version 2"),
    ],
)
def test_decode_header_signed_nonsense_raises(raw: bytes, hint: str) -> None:
    """A good crc32c is no reason to believe a length: everything is compared before it is used."""
    with pytest.raises(FrameError, match=hint):
        decode_header(raw)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"key": b"short"}, "key"),
        ({"parent": b""}, "parent"),
        ({"fingerprint": bytes(15)}, "fingerprint"),
        ({"n_tokens": 0}, "n_tokens"),
        ({"n_tokens": 5}, "n_tokens"),
        ({"payload_checksum": 2**64}, "payload_checksum"),
        ({"flags": Flags.PURE | Flags.APPROX}, "PURE"),
        ({"flags": Flags.PRE_ROPE}, "PURE"),
        ({"extra": ((0x8003, b""),)}, "0x8003"),
        ({"extra": ((0, b""),)}, "tag from 1"),
        ({"extra": ((1, bytes(40000)), (2, bytes(40000)))}, "too long"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_frame_header_impossible_raises_with_hint(change: dict[str, Any], hint: str) -> None:
    """A writer can't make a header that a reader would refuse."""
    with pytest.raises(ConfigError, match=hint):
        replace(HEADER, **change)


@pytest.mark.parametrize("flags", [Flags.APPROX, Flags.DERIVED | Flags.SESSION, Flags.PURE | Flags.HAS_SIDECAR | Flags.PRE_ROPE])
def test_header_flags_round_trip(flags: Flags) -> None:
    """Fidelity travels with the bytes."""
    assert decode_header(encode_header(replace(HEADER, flags=flags))).flags == flags


def test_header_longest_list_of_layers_fits() -> None:
    """The limit on layers is one that a header can hold even when no two neighbours are alike."""
    layers = (LayerSpec("full", 1, 2, 2), LayerSpec("full", 2, 2, 2)) * 512
    header = replace(HEADER, geometry=Geometry(layers, 4, "float16"))
    raw = encode_header(header)
    assert decode_header(raw + b"payload") == header
    assert header.header_bytes == len(raw) < 2**16
