"""The first page of an arena: pinned bytes, and every damage noticed."""

import struct

import google_crc32c
import pytest

from kvpool.errors import ConfigError, FrameError
from kvpool.tier import Superblock
from kvpool.tier.superblock import SUPERBLOCK_BYTES, decode_superblock, node_bytes

NODE = bytes(range(16))
BLOCK = Superblock(node_id=NODE, incarnation=7, capacity=1 << 30)


def independent_page() -> bytes:
    """The page as the documented table says, written without the code under test."""
    body = b"KVPARENA" + struct.pack("<II", 1, 0) + NODE + struct.pack("<QQQ", 7, 1 << 30, 4096)
    return body + struct.pack("<I", google_crc32c.value(body)) + bytes(4096 - 60)


def test_encode_matches_the_documented_layout() -> None:
    """Other programs map the file too: the bytes are a format, not an accident."""
    assert BLOCK.encode() == independent_page()
    assert decode_superblock(independent_page()) == BLOCK
    assert BLOCK.file_bytes == 4096 + (1 << 30)


@pytest.mark.parametrize("bit", [*range(0, 60 * 8, 7), 60 * 8, 4095 * 8])
def test_decode_with_one_bit_flipped_refuses(bit: int) -> None:
    """A damaged page must not give offsets to map."""
    page = bytearray(BLOCK.encode())
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        decode_superblock(bytes(page))


@pytest.mark.parametrize("page", [b"", BLOCK.encode()[:-1], BLOCK.encode() + b"\0"])
def test_decode_of_wrong_length_refuses(page: bytes) -> None:
    """A short file is not an arena."""
    with pytest.raises(FrameError, match="first page"):
        decode_superblock(page)


@pytest.mark.parametrize(("capacity", "data_offset"), [(0, 4096), (1, 0), (1, 4097)])
def test_decode_of_impossible_values_with_a_right_checksum_refuses(capacity: int, data_offset: int) -> None:
    """The checksum says the bytes are as written, not that they make sense."""
    body = b"KVPARENA" + struct.pack("<II", 1, 0) + NODE + struct.pack("<QQQ", 7, capacity, data_offset)
    page = body + struct.pack("<I", google_crc32c.value(body)) + bytes(4096 - 60)
    assert len(page) == SUPERBLOCK_BYTES
    with pytest.raises(FrameError, match="can't be"):
        decode_superblock(page)


def test_superblock_of_impossible_values_refused() -> None:
    """The owner's own mistakes are caught before they are written."""
    for node_id, incarnation, capacity in ((b"short", 1, 1), (NODE, -1, 1), (NODE, 1 << 64, 1), (NODE, 1, 0)):
        with pytest.raises(ConfigError):
            Superblock(node_id=node_id, incarnation=incarnation, capacity=capacity)


@pytest.mark.parametrize("text", ["", "zz" * 16, "00" * 15, "00" * 17])
def test_node_id_that_is_no_uuid_refused(text: str) -> None:
    """The id is 32 hex digits, and the message says so."""
    with pytest.raises(ConfigError, match="32 hexadecimal"):
        node_bytes(text)
