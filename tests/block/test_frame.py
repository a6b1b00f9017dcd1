"""The fast path: stamping and opening frames of one namespace."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import BlockKey, Flags, Framer, Geometry, LayerSpec, Namespace, chain_keys, decode_header, encode_header
from kvpool.errors import ConfigError, FrameError

DIM = st.integers(1, 24)
LAYER = st.one_of(
    st.builds(LayerSpec, st.just("full"), st.integers(1, 4), DIM, DIM),
    st.builds(LayerSpec, st.just("window"), st.integers(1, 4), DIM, DIM, st.integers(1, 4096)),
    st.builds(LayerSpec, st.just("mla"), st.just(1), DIM, st.just(0)),
)
GEOMETRY = st.builds(
    Geometry, st.lists(LAYER, min_size=1, max_size=40).map(tuple), st.integers(1, 32), st.sampled_from(["float32", "bfloat16"])
)


def namespace(geometry: Geometry, model: str = "m") -> Namespace:
    return Namespace(model=model, revision="r", weights_digest=b"w" * 32, geometry=geometry, rope="none")


SPACE = namespace(Geometry.uniform(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float32"))
FRAMER = Framer(SPACE)
KEYS = chain_keys(SPACE.root(), [1, 2, 3, 4, 5, 6, 7, 8, 9], 4, tail=True)


def stamped(framer: Framer = FRAMER, key: BlockKey = KEYS[1], parent: BlockKey = KEYS[0], n_tokens: int = 4) -> np.ndarray:
    frame = np.random.default_rng(3).integers(0, 256, framer.frame_bytes(n_tokens), dtype=np.uint8)
    framer.stamp(frame, key, parent, n_tokens)
    return frame


def with_header(frame: np.ndarray, **change: object) -> bytes:
    """The frame with some fields of its header changed and the header signed again."""
    header = decode_header(frame.tobytes())
    return encode_header(replace(header, **change)) + frame[header.header_bytes :].tobytes()  # type: ignore[arg-type]


@settings(deadline=None)
@given(GEOMETRY, st.data())
def test_frame_any_geometry_and_tokens_round_trips(geometry: Geometry, data: st.DataObject) -> None:
    """What is stamped opens to the same payload, partial blocks included, and the general codec reads the same header."""
    framer = Framer(namespace(geometry))
    n_tokens = data.draw(st.integers(1, geometry.block_tokens))
    key, parent = BlockKey(data.draw(st.binary(min_size=32, max_size=32))), BlockKey(data.draw(st.binary(min_size=32, max_size=32)))
    frame = stamped(framer, key, parent, n_tokens)
    view = framer.open(frame, key)
    assert np.shares_memory(view.payload, frame)
    assert (view.n_tokens, view.parent, view.flags, view.approx) == (n_tokens, parent, Flags.PURE, False)
    assert view.payload.size == geometry.payload_bytes(n_tokens) == frame.size - framer.header_bytes
    assert framer.header_bytes % 64 == 0
    header = decode_header(frame.tobytes())
    assert (header.geometry, header.key, header.header_bytes) == (geometry, key, framer.header_bytes)
    assert encode_header(header) == frame[: framer.header_bytes].tobytes()
    assert header.payload_checksum == framer.checksum(view.payload)


def test_open_every_kind_of_buffer_is_the_same() -> None:
    """Readers hold arrays, mappings and received bytes."""
    frame = stamped()
    expected = frame[FRAMER.header_bytes :].tobytes()
    for buf in (frame, frame.data, frame.tobytes(), bytearray(frame), memoryview(frame.tobytes())):
        assert FRAMER.open(buf, KEYS[1]).payload.tobytes() == expected


def test_stamp_leaves_the_payload_alone() -> None:
    """Writers put the payload where it stays; stamping only writes in front of it."""
    frame = np.arange(FRAMER.frame_bytes(2), dtype=np.int64).astype(np.uint8)
    before = frame[FRAMER.header_bytes :].copy()
    FRAMER.stamp(frame, KEYS[1], KEYS[0], 2)
    assert np.array_equal(frame[FRAMER.header_bytes :], before)


def test_stamp_memoryview_is_written_in_place() -> None:
    """A mapping handed out as a memoryview is as good as an array."""
    mapped = bytearray(FRAMER.frame_bytes(4))
    FRAMER.stamp(memoryview(mapped), KEYS[1], KEYS[0], 4)
    assert FRAMER.open(mapped, KEYS[1]).payload.tobytes() == bytes(SPACE.geometry.payload_bytes(4))


def test_header_without_parent_names_the_root() -> None:
    """The first block's parent is the namespace root."""
    frame = stamped(key=KEYS[0], parent=BlockKey(b""))
    assert FRAMER.open(frame, KEYS[0]).parent == SPACE.root() == FRAMER.root


def test_open_tail_block_has_its_own_length() -> None:
    """A partial block stores n tokens' bytes, and a full block's bytes under its header are refused."""
    frame = stamped(key=KEYS[2], parent=KEYS[1], n_tokens=1)
    assert FRAMER.open(frame, KEYS[2]).n_tokens == 1
    assert frame.size == FRAMER.header_bytes + SPACE.geometry.bytes_per_token
    longer = np.concatenate([frame, frame[FRAMER.header_bytes :]])
    with pytest.raises(FrameError, match="1 tokens"):
        FRAMER.open(longer, KEYS[2])


def test_open_other_key_raises() -> None:
    """A recycled slot holds a valid frame of another block: it must be a miss."""
    with pytest.raises(FrameError, match="holds block"):
        FRAMER.open(stamped(), KEYS[0])


@pytest.mark.parametrize(
    "other",
    [
        namespace(SPACE.geometry, "other"),
        namespace(replace(SPACE.geometry, dtype="bfloat16")),
        namespace(replace(SPACE.geometry, block_tokens=8)),
    ],
    ids=["model", "dtype", "block"],
)
def test_open_other_namespace_raises(other: Namespace) -> None:
    """Another model's bytes under the same key must not be read, whichever way round."""
    with pytest.raises(FrameError, match="namespace"):
        Framer(other).open(stamped(), KEYS[1])
    with pytest.raises(FrameError, match="namespace"):
        FRAMER.open(stamped(Framer(other)), KEYS[1])


def test_open_forged_geometry_under_own_fingerprint_raises() -> None:
    """The fingerprint alone is not believed: the layers in the header must be the reader's."""
    other = Geometry.uniform(layers=2, kv_heads=1, head_dim=16, block_tokens=4, dtype="float32")
    with pytest.raises(FrameError, match="namespace"):
        FRAMER.open(with_header(stamped(), geometry=other), KEYS[1])


def test_open_payload_damaged_raises() -> None:
    """One flipped bit anywhere in the payload is found."""
    frame = stamped()
    for at in range(FRAMER.header_bytes, frame.size, 17):
        frame[at] ^= 1 << at % 8
        with pytest.raises(FrameError, match="payload checksum"):
            FRAMER.open(frame, KEYS[1])
        frame[at] ^= 1 << at % 8
    assert FRAMER.open(frame, KEYS[1]).n_tokens == 4


def test_open_newer_writers_extra_field_is_accepted() -> None:
    """A field that may be skipped makes the header another one, even a longer one; the block is still the block."""
    frame = stamped()
    for extra in (((0x0123, b"x"),), ((0x0123, bytes(300)),)):
        data = with_header(frame, extra=extra)
        view = FRAMER.open(data, KEYS[1])
        assert view.payload.tobytes() == frame[FRAMER.header_bytes :].tobytes()


@pytest.mark.parametrize("flags", [Flags.APPROX, Flags.DERIVED, Flags.SESSION | Flags.APPROX])
def test_open_approx_frame_needs_consent(flags: Flags) -> None:
    """What was computed on a loss must never pass for the exact block, written by this framer or by another."""
    tainted = Framer(SPACE, flags=flags)
    frame = stamped(tainted)
    for framer in (FRAMER, tainted):
        with pytest.raises(FrameError, match="not the exact block"):
            framer.open(frame, KEYS[1])
        view = framer.open(frame, KEYS[1], accept_approx=True)
        assert (view.approx, view.flags) == (True, flags)
    assert not tainted.open(stamped(), KEYS[1]).approx


def test_open_other_rotation_state_raises() -> None:
    """K before rotation read as K after it would be wrong bytes."""
    unrotated = Framer(SPACE, flags=Flags.PURE | Flags.PRE_ROPE)
    assert unrotated.open(stamped(unrotated), KEYS[1]).n_tokens == 4
    with pytest.raises(FrameError, match="rotation"):
        FRAMER.open(stamped(unrotated), KEYS[1])


@pytest.mark.parametrize("data", [b"", bytes(10), bytes(192), bytes(192 + 512)], ids=len)
def test_open_zeros_or_nothing_raises(data: bytes) -> None:
    """Memory that nobody wrote is not a frame."""
    with pytest.raises(FrameError):
        FRAMER.open(data, KEYS[1])


def test_open_unusable_buffer_raises_config_error() -> None:
    """A caller's mistake is not a miss."""
    frame = stamped()
    for buf in (np.repeat(frame, 2)[::2], frame.reshape(1, -1), frame.view(np.int8), np.repeat(frame, 2).data[::2]):
        with pytest.raises(ConfigError, match="contiguous"):
            FRAMER.open(buf, KEYS[1])


def test_stamp_unusable_frame_raises_config_error() -> None:
    """A frame of the wrong length would leave a tail that no reader accepts."""
    frame = stamped()
    frozen = frame.copy()
    frozen.flags.writeable = False
    for bad in (frame[:-1], np.zeros(frame.size + 1, np.uint8), frozen, frame.tobytes()):
        with pytest.raises(ConfigError, match="stamp needs"):
            FRAMER.stamp(bad, KEYS[1], KEYS[0], 4)
    for n_tokens in (0, 5):
        with pytest.raises(ConfigError, match="1 to 4 tokens"):
            FRAMER.stamp(frame, KEYS[1], KEYS[0], n_tokens)


@pytest.mark.parametrize(("key", "parent"), [(b"", KEYS[0]), (KEYS[1][:31], KEYS[0]), (KEYS[1], b"x"), (KEYS[1].hex(), KEYS[0])])
def test_header_bad_key_raises(key: BlockKey, parent: BlockKey) -> None:
    """A short key would shift every field behind it."""
    with pytest.raises(ConfigError, match="32 bytes"):
        FRAMER.header(key, parent, 4, 0)


@pytest.mark.parametrize("checksum", [-1, 2**64])
def test_header_bad_checksum_raises(checksum: int) -> None:
    """Only what checksum() returns fits."""
    with pytest.raises(ConfigError, match="checksum"):
        FRAMER.header(KEYS[1], KEYS[0], 4, checksum)


def test_checksum_strided_payload_raises() -> None:
    """A strided view has no bytes in a row to hash."""
    with pytest.raises(ConfigError, match="contiguous"):
        FRAMER.checksum(np.zeros((8, 8), np.float32)[:, ::2])


def test_framer_impossible_flags_raise() -> None:
    """A writer can't claim both."""
    with pytest.raises(ConfigError, match="PURE"):
        Framer(SPACE, flags=Flags.PURE | Flags.SESSION)
