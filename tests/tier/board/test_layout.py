"""The words of a board: as documented, every damage noticed, small enough."""

import mmap
import struct

import google_crc32c
import pytest

from kvpool.errors import ConfigError, FrameError
from kvpool.testing.tier_kit import key_of
from kvpool.tier.board import Board, Flag, board_slots
from kvpool.tier.board.layout import FORMAT, HEADER_BYTES, NEVER, STATE_WORD, Shape, State, decode_header, encode_header, page_of, shape_for

NODE = "0123456789abcdef" * 2


def page(shape: Shape) -> bytes:
    """A live board's first page."""
    raw = bytearray(encode_header(shape).ljust(HEADER_BYTES, b"\0"))
    struct.pack_into("Q", raw, 8 * STATE_WORD, State.LIVE)
    return bytes(raw)


def test_header_is_the_documented_bytes_and_is_read_back() -> None:
    """Readers of another build of this format must find the same words in the same places."""
    shape = Shape(bytes.fromhex(NODE), 9, 16)
    body = struct.pack("8sQ16s4Q", b"KVPBOARD", FORMAT, bytes.fromhex(NODE), 9, 16, 4096, 4096 + 128)
    assert encode_header(shape) == body + struct.pack("Q", google_crc32c.value(body))
    assert decode_header(page(shape), shape.nbytes) == shape
    assert shape.nbytes == 4096 + 8192


@pytest.mark.parametrize("bit", range(0, 72 * 8, 7))
def test_header_with_a_flipped_bit_is_refused(bit: int) -> None:
    """Whatever bit rots, no reader takes wrong offsets for right ones."""
    shape = Shape(bytes(16), 1, 16)
    raw = bytearray(page(shape))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        decode_header(bytes(raw), shape.nbytes)


def test_header_that_is_short_or_of_another_size_or_shape_is_refused() -> None:
    """A reader maps what the header says, so it has to be there; a checksum alone doesn't make a shape possible."""
    shape = Shape(bytes(16), 1, 16)
    for raw, nbytes in ((b"", 0), (page(shape)[:-1], shape.nbytes), (page(shape), shape.nbytes - 4096), (page(shape), shape.nbytes + 4096)):
        with pytest.raises(FrameError):
            decode_header(raw, nbytes)
    for buckets in (0, 1, 12):
        odd = Shape(bytes(16), 1, buckets)
        with pytest.raises(FrameError, match="can't be"):
            decode_header(page(odd), odd.nbytes)


@pytest.mark.parametrize(
    ("max_blocks", "capacity", "slots"),
    [
        (1, 1, 8),
        (4, 1 << 20, 8),
        (5, 1 << 30, 16),
        (32, 1 << 30, 64),
        (1 << 20, 1 << 30, 1 << 18),
        (1 << 20, 3 << 29, 1 << 19),
        (100_000, 1 << 40, 1 << 18),
    ],
)
def test_board_has_twice_the_slots_that_blocks_can_need(max_blocks: int, capacity: int, slots: int) -> None:
    """Room for all, and a bound on the memory: at most 3.3 % of an arena that is full of the smallest blocks."""
    assert board_slots(max_blocks, capacity) == slots
    if capacity >= 1 << 30 and max_blocks >= capacity // 8192:
        assert shape_for(NODE, 1, max_blocks, capacity).nbytes < 0.033 * capacity


def test_board_without_a_size_or_an_identity_is_refused() -> None:
    """Told when it is made, not when a reader comes."""
    for max_blocks, capacity in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError):
            board_slots(max_blocks, capacity)
    with pytest.raises(ConfigError, match="not a node id"):
        shape_for("someone", 1, 1, 1)
    with pytest.raises(ConfigError, match="64 bits"):
        shape_for(NODE, 1 << 64, 1, 1)


def test_record_is_the_documented_words() -> None:
    """Generation 2 after the first publication, odd after a withdrawal; the tag is in the key's first bucket, and gone with it."""
    board, key = Board.create(NODE, 9, max_blocks=8, capacity=1 << 20), key_of(1)
    words = struct.unpack("4Q", key)
    board.publish(key, 640, 128, flags=Flag.UNVERIFIED)

    def look() -> tuple[tuple[int, ...], tuple[int, ...]]:
        with mmap.mmap(board.read_fd, board.shape.nbytes, prot=mmap.PROT_READ) as raw:
            assert decode_header(page_of(board.read_fd), len(raw)) == board.shape
            slot = words[1] % board.shape.buckets * 4
            record = struct.unpack_from("8Q", raw, board.shape.records_at + slot * 64)
            return record, struct.unpack_from(f"{board.shape.buckets}Q", raw, 4096)

    record, tags = look()
    assert record == (2, 640, 128 | 1 << 48, NEVER, *words)
    empty = 0x4000_4000_4000_4000
    assert tags[words[1] % board.shape.buckets] == (words[0] & 0x3FFF) << 48 | empty & (1 << 48) - 1
    assert sum(tag != empty for tag in tags) == 1
    board.withdraw(key)
    record, tags = look()
    assert (record[0], set(tags)) == (3, {empty})
    board.close()
