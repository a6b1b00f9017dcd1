"""A look at a header is as strict as opening the frame, but for what it says it leaves out."""

import numpy as np
import pytest

from kvpool.block import Flags, Framer, Geometry, Namespace, chain_keys
from kvpool.block.header import CRC_AT, PARENT_AT
from kvpool.client.glance import Glance

GEOMETRY = Geometry.uniform(layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float32")
NAMESPACE = Namespace(model="m", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
FRAMER = Framer(NAMESPACE)
CHAIN = chain_keys(FRAMER.root, list(range(4 * 5)), 4)


def frames(n_tokens: int = 4) -> np.ndarray:
    """The frames of `CHAIN`, one after another, each payload of random bytes."""
    length = FRAMER.frame_bytes(n_tokens)
    memory = np.random.default_rng(1).integers(0, 256, (len(CHAIN), length), dtype=np.uint8)
    for i, key in enumerate(CHAIN):
        FRAMER.stamp(memory[i], key, CHAIN[i - 1] if i else FRAMER.root, n_tokens)
    return memory


def header(frame: np.ndarray) -> bytes:
    return frame[: FRAMER.header_bytes].tobytes()


@pytest.mark.parametrize("n_tokens", [1, 3, 4])
def test_frames_of_the_framer_match(n_tokens: int) -> None:
    """Whatever was stamped for the key is taken, full blocks and partial ones."""
    glance = Glance(FRAMER, n_tokens)
    for frame, key in zip(frames(n_tokens), CHAIN, strict=True):
        assert glance.matches(header(frame), key)
        assert glance.sound(header(frame), key, frame[FRAMER.header_bytes :])


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    """By `matches` in all that names the block, by `sound` everywhere; `alike` says the same as `matches`."""
    glance, memory = Glance(FRAMER, 4), frames()
    frame, key = memory[1], CHAIN[1]
    checksum_at = next(at for at in range(FRAMER.header_bytes) if header(frame)[at : at + 8] == _checksum(frame))
    left_out = {*range(PARENT_AT, PARENT_AT + 32), *range(CRC_AT, CRC_AT + 4), *range(checksum_at, checksum_at + 8)}
    for at in range(FRAMER.header_bytes):
        frame[at] ^= 1 << at % 8
        assert glance.matches(header(frame), key) == (at in left_out), at
        assert _alike(glance, memory)[1] == (at in left_out), at
        assert not glance.sound(header(frame), key, frame[FRAMER.header_bytes :]), at
        frame[at] ^= 1 << at % 8
    assert _alike(glance, memory) == [True] * len(CHAIN)


def test_flipped_bit_of_a_payload_is_seen_by_sound() -> None:
    """That is what the checksum is for."""
    frame = frames()[0]
    frame[-1] ^= 1
    assert not Glance(FRAMER, 4).sound(header(frame), CHAIN[0], frame[FRAMER.header_bytes :])


def test_other_key_length_namespace_or_flags_is_no_match() -> None:
    """A sound frame of something else is not an answer."""
    frame = header(frames()[0])
    assert not Glance(FRAMER, 4).matches(frame, CHAIN[1])
    assert not Glance(FRAMER, 3).matches(frame, CHAIN[0])
    other = Namespace(model="n", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
    assert not Glance(Framer(other), 4).matches(frame, CHAIN[0])
    lossy = Framer(NAMESPACE, flags=Flags.APPROX).header(CHAIN[0], FRAMER.root, 4, 7)
    assert not Glance(FRAMER, 4).matches(lossy, CHAIN[0])


def test_lengths_and_offsets_that_can_not_be_are_no_match() -> None:
    """A board is another process's memory: whatever it says, nothing outside the arena is read."""
    glance, memory = Glance(FRAMER, 4), frames()
    flat, keys = memory.reshape(-1), CHAIN[0] * 3
    offsets = np.array([0, 1 << 40, 2**64 - 64], np.uint64)
    lengths = np.array([glance.frame_bytes] * 3, np.uint64)
    assert glance.alike(flat, offsets, lengths, keys).tolist() == [True, False, False]
    assert glance.alike(flat, offsets, lengths + np.uint64(64), keys).tolist() == [False] * 3


def _checksum(frame: np.ndarray) -> bytes:
    return FRAMER.checksum(frame[FRAMER.header_bytes :]).to_bytes(8, "little")


def _alike(glance: Glance, memory: np.ndarray) -> list[bool]:
    count, length = memory.shape
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(length)
    good: list[bool] = glance.alike(memory.reshape(-1), offsets, np.full(count, length, np.uint64), b"".join(CHAIN)).tolist()
    return good
