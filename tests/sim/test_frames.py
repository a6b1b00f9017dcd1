"""Frames that say what they are."""

from hashlib import sha256

import pytest

from kvpool.block import BlockKey
from kvpool.testing.sim.frames import HEADER_BYTES, is_exact, make_frame, opens

KEY, OTHER = BlockKey(sha256(b"a").digest()), BlockKey(sha256(b"b").digest())


@pytest.mark.parametrize("length", [HEADER_BYTES, 64, 100, 1000])
def test_frame_of_any_length_opens_and_is_exact(length: int) -> None:
    """A whole frame must be taken."""
    frame = make_frame(KEY, length, 7)
    assert len(frame) == length
    assert opens(frame, KEY)
    assert is_exact(frame, KEY, length)
    assert not opens(frame, OTHER)


def test_frame_with_any_bit_flipped_does_not_open() -> None:
    """Whatever byte is damaged, a reader must notice."""
    frame = make_frame(KEY, 100, 7)
    for bit in range(100 * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        assert not opens(bytes(damaged), KEY)


def test_frame_mixed_from_two_writes_does_not_open() -> None:
    """Half of one write and half of another is no block."""
    one, two = make_frame(KEY, 200, 1), make_frame(KEY, 200, 2)
    assert all(one[i : i + 8] != two[i : i + 8] for i in range(HEADER_BYTES, 200, 8))
    for cut in range(1, 200):
        mixed = one[:cut] + two[cut:]
        assert mixed in (one, two) or not opens(mixed, KEY)


def test_frame_that_opens_but_was_never_made_is_not_exact() -> None:
    """The judge must know more than a reader: a forged payload under a good checksum is wrong."""
    frame = make_frame(OTHER, 100, 7)
    assert opens(frame, OTHER)
    assert not is_exact(frame, KEY, 100)
    assert not is_exact(make_frame(KEY, 100, 7), KEY, 128)
