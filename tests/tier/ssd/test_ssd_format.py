"""The bytes of the log: golden vectors by an independent encoder, and every way to damage them."""

import struct
from collections.abc import Callable

import google_crc32c
import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, FrameError
from kvpool.tier.ssd.format import (
    SEAL,
    Group,
    Place,
    RecordItem,
    SegmentPage,
    Super,
    Tombstone,
    decode_group,
    decode_segment,
    decode_super,
    encode_group,
    encode_segment,
    encode_super,
    group_header_bytes,
    header_bytes,
)

KEY, PARENT = BlockKey(bytes(range(32))), BlockKey(bytes(range(100, 132)))
RECORD = RecordItem(KEY, PARENT, 48, 5000, 1_700_000_000_000, 4096, "acme", 4096, 0x1122334455667788, 60_000)
ORPHAN = RecordItem(PARENT, None, 0, 7, 0, 0, "", 9152, 1)
TOMB = Tombstone(KEY, Place(3, 8192))
GROUP = Group(9, 77, 8192, 12288, (RECORD, ORPHAN), (TOMB,), 0)


def golden_group() -> bytes:
    """GROUP, byte by byte from the table in the docs."""
    items = (
        struct.pack("<BBHIQQQQQQ", 1, 1, 4, 4096, 5000, 48, 1_700_000_000_000, 4096, 60_000, 0x1122334455667788) + KEY + PARENT + b"acme"
    )
    items += struct.pack("<BBHIQQQQQQ", 1, 0, 0, 9152, 7, 0, 0, 0, 0, 1) + PARENT + bytes(32)
    items += struct.pack("<BBHIQ", 2, 0, 0, 8192, 3) + KEY
    fixed = b"KVPGROUP" + struct.pack("<HHIQQQQI", 1, 0, 3, 9, 77, 8192, 12288, 56 + len(items))
    return fixed + struct.pack("<I", google_crc32c.value(fixed + items)) + items


def golden_page(magic: bytes, *numbers: int) -> bytes:
    body = magic + struct.pack("<II", 1, 0) + b"".join(struct.pack("<Q", number) for number in numbers)
    return (body + struct.pack("<I", google_crc32c.value(body))).ljust(4096, b"\0")


def test_group_header_matches_its_golden_vector() -> None:
    """A log written today must be read by tomorrow's build."""
    raw = golden_group()
    assert encode_group(GROUP) == raw
    assert decode_group(raw) == GROUP
    assert group_header_bytes(raw) == len(raw) == header_bytes(["acme", ""], 1)


def test_pages_match_their_golden_vectors() -> None:
    """The same for the superblock and a segment's first page."""
    assert encode_super(Super(5, 1 << 20)) == golden_page(b"KVPSSDLG", 5, 1 << 20)
    assert decode_super(golden_page(b"KVPSSDLG", 5, 1 << 20)) == Super(5, 1 << 20)
    assert encode_segment(SegmentPage(4, 5, 1 << 20)) == golden_page(b"KVPSEGMT", 4, 5, 1 << 20)
    assert decode_segment(golden_page(b"KVPSEGMT", 4, 5, 1 << 20)) == SegmentPage(4, 5, 1 << 20)


@pytest.mark.parametrize(
    ("raw", "decode"),
    [
        (golden_group(), decode_group),
        (encode_super(Super(5, 4096)), decode_super),
        (encode_segment(SegmentPage(4, 5, 4096)), decode_segment),
    ],
    ids=["group", "super", "segment"],
)
def test_header_one_byte_short_long_or_one_bit_wrong_refused(raw: bytes, decode: Callable[[bytes], object]) -> None:
    """Every bit of a header is checked: a flipped one must not move, lengthen or rename a record."""
    for damaged in (raw[:-1], raw + b"\0", b""):
        with pytest.raises(FrameError):
            decode(damaged)
    for at in range(len(raw)):
        for bit in range(8) if at < 256 else (at % 8,):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << bit
            with pytest.raises(FrameError):
                decode(bytes(flipped))


@pytest.mark.parametrize(
    "group",
    [
        GROUP._replace(records=(RECORD._replace(at=12288 - 4999),)),
        GROUP._replace(records=(RECORD._replace(at=8),)),
        GROUP._replace(records=(RECORD._replace(length=0),)),
        GROUP._replace(records=(RECORD._replace(ttl_ms=0),)),
        GROUP._replace(offset=100),
        GROUP._replace(total=5000),
        GROUP._replace(total=0),
        GROUP._replace(total=1 << 40),
        GROUP._replace(flags=2),
    ],
)
def test_group_with_right_checksum_and_impossible_numbers_refused(group: Group) -> None:
    """Nobody reads outside a group because a header says so."""
    with pytest.raises(FrameError):
        decode_group(encode_group(group))


def test_seal_and_numbers_beyond_64_bits() -> None:
    """A sealing group is an empty one with its flag; a number that can't be stored is the caller's error."""
    seal = Group(1, 2, 4096, 4096, flags=SEAL)
    assert decode_group(encode_group(seal)) == seal
    with pytest.raises(ConfigError, match="64"):
        encode_group(GROUP._replace(records=(RECORD._replace(depth=1 << 64),)))
    with pytest.raises(ConfigError, match="tenant"):
        header_bytes(["x" * 1025], 0)
