"""The bytes of a shared region: as documented, every damage noticed, and room for what was promised."""

import hashlib
import struct

import google_crc32c
import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, FrameError
from kvpool.testing.tier_kit import key_of
from kvpool.tier.contract import Entry
from kvpool.tier.shared.layout import (
    SUPERBLOCK_BYTES,
    RegionState,
    Shape,
    Slot,
    SlotState,
    buckets_of,
    data_offset_for,
    decode_slot,
    decode_superblock,
    encode_slot,
    encode_superblock,
    slots_for,
)

NODE = bytes(range(16))
SHAPE = Shape(NODE, 7, 8, 16, 8192, 1000)
SLOT = Slot(3, SlotState.READY, 8, 640, 2**64 - 1, Entry(key_of(1), key_of(2), 96, 1234, 99, 128, "ténant"))


def test_superblock_matches_the_documented_layout() -> None:
    """Other hosts, perhaps with another build, map the region too."""
    body = b"KVPSHARE" + struct.pack("<II", 1, 2) + NODE + struct.pack("<QQQQQ", 7, 8, 16, 8192, 1000)
    raw = (body + struct.pack("<I", google_crc32c.value(body))).ljust(SUPERBLOCK_BYTES, b"\0")
    assert encode_superblock(SHAPE, RegionState.LIVE) == raw
    assert decode_superblock(raw, 9192) == (SHAPE, RegionState.LIVE)


def test_slot_matches_the_documented_layout() -> None:
    """256 bytes, four lines; the checksum covers all."""
    head = struct.pack("<QII", 3, 2, 0) + struct.pack("<QQQQQQ", 8, 640, 1234, 2**64 - 1, 99, 96)
    tail = key_of(1) + key_of(2) + struct.pack("<QBB", 128, 1, 7) + "ténant".encode().ljust(118, b"\0")
    raw = head + tail
    assert len(raw) == 256
    assert encode_slot(SLOT) == raw[:12] + struct.pack("<I", google_crc32c.value(raw)) + raw[16:]
    assert decode_slot(encode_slot(SLOT)) == SLOT
    head_of_chain = SLOT._replace(entry=Entry(key_of(1), None, 0, 1))
    assert decode_slot(encode_slot(head_of_chain)) == head_of_chain


@pytest.mark.parametrize("bit", range(0, 256 * 8, 29))
def test_slot_with_one_bit_flipped_is_none(bit: int) -> None:
    """A torn or rotten slot is nobody's record."""
    raw = bytearray(encode_slot(SLOT))
    raw[bit // 8] ^= 1 << bit % 8
    assert decode_slot(bytes(raw)) is None


@pytest.mark.parametrize("bit", range(0, 76 * 8, 11))
def test_superblock_with_one_bit_flipped_refused(bit: int) -> None:
    """Wrong sizes would send readers anywhere."""
    raw = bytearray(encode_superblock(SHAPE, RegionState.LIVE))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        decode_superblock(bytes(raw), 9192)


def test_free_and_untouched_slots_are_none() -> None:
    """The table starts as zeros."""
    assert decode_slot(bytes(256)) is None
    assert decode_slot(encode_slot(SLOT._replace(state=SlotState.FREE))) is None


@pytest.mark.parametrize("shape", [SHAPE._replace(slots=8), SHAPE._replace(slots=17), SHAPE._replace(data_offset=4096), SHAPE])
def test_superblock_that_does_not_fit_its_region_refused(shape: Shape) -> None:
    """The checksum says the bytes are as written, not that they make sense here."""
    with pytest.raises(FrameError, match="can't be"):
        decode_superblock(encode_superblock(shape, RegionState.LIVE), 9191)
    with pytest.raises(ConfigError):
        encode_superblock(SHAPE._replace(incarnation=1 << 64), RegionState.LIVE)


@pytest.mark.parametrize("max_objects", [1, 5, 1000, 30_000])
def test_table_takes_as_many_keys_as_promised(max_objects: int) -> None:
    """Two choices, buckets of eight, half full: no key is turned away before the limit."""
    buckets = slots_for(max_objects) // 8
    assert data_offset_for(slots_for(max_objects)) >= 4096 + 512 * max_objects
    load = [0] * buckets
    for number in range(max_objects):
        first, second = buckets_of(BlockKey(hashlib.sha256(b"%d" % number).digest()), buckets)
        assert first != second
        load[first if load[first] <= load[second] else second] += 1
    assert max(load) <= 8
