"""A keeper's check of a frame: whole and of its key, whatever the namespace."""

import numpy as np
import pytest

from kvpool.block import BlockKey, Framer, Geometry, Namespace, check_frame
from kvpool.errors import FrameError

KEY = BlockKey(b"k" * 32)


def frame_of(model: str, n_tokens: int) -> np.ndarray:
    geometry = Geometry.uniform(layers=2, kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")
    framer = Framer(Namespace(model=model, revision="1", weights_digest=bytes(32), geometry=geometry, rope="none"))
    frame = np.full(framer.frame_bytes(n_tokens), 5, np.uint8)
    framer.stamp(frame, KEY, framer.root, n_tokens)
    return frame


@pytest.mark.parametrize(("model", "n_tokens"), [("a", 4), ("b", 4), ("a", 1)])
def test_sound_frame_of_any_namespace_passes(model: str, n_tokens: int) -> None:
    """A node keeps blocks of all models and knows none of them."""
    check_frame(frame_of(model, n_tokens), KEY)


def test_frame_of_another_block_is_refused() -> None:
    """Sound bytes in the wrong place are damage too."""
    with pytest.raises(FrameError, match="holds block"):
        check_frame(frame_of("a", 4), BlockKey(b"x" * 32))


def test_any_flipped_bit_and_any_other_length_is_refused() -> None:
    """Header or payload, one bit is enough; so is one byte."""
    frame = frame_of("a", 4)
    for place in range(frame.size):
        bad = frame.copy()
        bad[place] ^= 1 << (place % 8)
        with pytest.raises(FrameError):
            check_frame(bad, KEY)
    for bad in (frame[:-1], np.append(frame, np.uint8(0)), frame[:0]):
        with pytest.raises(FrameError):
            check_frame(bad, KEY)
