"""Sizes and layout of blocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.block import MAX_BLOCK_TOKENS, Geometry, LayerSpec
from kvpool.errors import ConfigError

DIM = st.integers(1, 96)
HEADS = st.integers(1, 6)
LAYER = st.one_of(
    st.builds(LayerSpec, st.just("full"), HEADS, DIM, DIM),
    st.builds(LayerSpec, st.just("window"), HEADS, DIM, DIM, st.integers(1, 2**32 - 1)),
    st.builds(LayerSpec, st.just("mla"), st.just(1), DIM, st.just(0)),
    st.just(LayerSpec("none", 0, 0, 0)),
)
GEOMETRY = st.builds(
    Geometry,
    st.lists(LAYER, min_size=1, max_size=6).map(tuple).filter(lambda layers: any(s.kind != "none" for s in layers)),
    st.integers(1, MAX_BLOCK_TOKENS),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
MLA = LayerSpec("mla", 1, 512 + 64, 0)


def uniform(layers: int, heads: int, dim: int, dtype: str = "bfloat16", block: int = 16) -> Geometry:
    return Geometry.uniform(layers=layers, kv_heads=heads, head_dim=dim, block_tokens=block, dtype=dtype)


@pytest.mark.parametrize(
    ("geometry", "per_token"),
    [
        (uniform(80, 8, 128), 320 * 1024),  # Llama-3-70B, GQA
        (uniform(30, 3, 64), 23_040),  # SmolLM2-135M
        (uniform(30, 3, 64, "float32"), 46_080),
        (uniform(32, 32, 128), 512 * 1024),  # Llama-2-7B, MHA
        (uniform(32, 1, 64), 8 * 1024),  # Falcon-7B, MQA
        (uniform(126, 8, 128), 504 * 1024),  # Llama-3.1-405B
        (Geometry((MLA,) * 60, 16, "bfloat16"), 69_120),  # DeepSeek-V2
        (Geometry((MLA,) * 61, 16, "bfloat16"), 70_272),  # DeepSeek-V3
        (Geometry((LayerSpec("window", 8, 64, 64, 128), LayerSpec("full", 8, 64, 64)) * 12, 16, "float16"), 49_152),  # gpt-oss-20b
        (Geometry((LayerSpec("none", 0, 0, 0),) * 3 + (LayerSpec("full", 2, 64, 64),), 16, "float16"), 512),
    ],
)
def test_bytes_per_token_known_models_match_published(geometry: Geometry, per_token: int) -> None:
    """Capacity planning and transfers rest on these numbers; they are the published ones."""
    assert geometry.bytes_per_token == per_token
    assert geometry.payload_bytes(16) == 16 * per_token


def test_payload_bytes_smollm2_block_is_720_kib() -> None:
    """The block the end-to-end runs move: 16 tokens in float32."""
    assert uniform(30, 3, 64, "float32").payload_bytes(16) == 737_280


@pytest.mark.parametrize("block", [1, 2, 16, 100, 511, 512])
def test_payload_bytes_any_block_size_is_packed(block: int) -> None:
    """A partial block takes only its own tokens' bytes; nothing is padded."""
    geometry = uniform(2, 3, 8, block=block)
    assert [geometry.payload_bytes(n) for n in range(1, block + 1)] == [n * 2 * 2 * 3 * 8 * 2 for n in range(1, block + 1)]
    for n in (0, -1, block + 1):
        with pytest.raises(ConfigError, match=f"1 to {block}"):
            geometry.payload_bytes(n)


def test_segments_uniform_model_equal_slices_of_one_array() -> None:
    """The layout promise to engines: one C-contiguous [layers, 2, kv_heads, tokens, head_dim] array."""
    geometry = uniform(3, 2, 4, "float32")
    shape = geometry.uniform_shape(5)
    assert shape == (3, 2, 2, 5, 4)
    payload = np.arange(geometry.payload_bytes(5) // 4, dtype=np.float32)
    whole, raw = payload.reshape(shape), payload.view(np.uint8)
    for s in geometry.segments(5):
        part = raw[s.offset : s.offset + s.length].view(np.float32).reshape(s.shape)
        assert np.array_equal(part, whole[s.layer, 0 if s.part == "K" else 1])


def test_segments_mixed_model_are_as_written() -> None:
    """Latents are one array without heads, empty layers are absent, K and V may differ."""
    layers = (MLA, LayerSpec("none", 0, 0, 0), LayerSpec("window", 2, 8, 4, 7))
    geometry = Geometry(layers, 4, "float16")
    assert [tuple(s) for s in geometry.segments(3)] == [
        (0, "K", 0, 3 * 576 * 2, (3, 576)),
        (2, "K", 3456, 2 * 3 * 8 * 2, (2, 3, 8)),
        (2, "V", 3456 + 96, 2 * 3 * 4 * 2, (2, 3, 4)),
    ]
    assert geometry.uniform_shape(3) is None


@pytest.mark.parametrize("layers", [(MLA,), (LayerSpec("full", 2, 8, 4),), (LayerSpec("full", 2, 8, 8), LayerSpec("full", 1, 8, 8))])
def test_uniform_shape_without_one_array_is_none(layers: tuple[LayerSpec, ...]) -> None:
    """What can't be seen as one array must not be."""
    assert Geometry(layers, 4, "float16").uniform_shape(4) is None


@settings(deadline=None)
@given(GEOMETRY, st.data())
def test_segments_any_geometry_tile_the_payload(geometry: Geometry, data: st.DataObject) -> None:
    """Segments follow each other without holes, fill the payload exactly, and their shapes agree with their lengths."""
    n_tokens = data.draw(st.integers(1, geometry.block_tokens))
    at = 0
    for segment in geometry.segments(n_tokens):
        assert segment.offset == at
        assert segment.length == int(np.prod(segment.shape)) * geometry.itemsize
        at += segment.length
    assert at == geometry.payload_bytes(n_tokens)


def test_part_even_split_adds_up_to_the_whole() -> None:
    """Together the parts store each head once."""
    whole = uniform(80, 8, 128)
    assert [whole.part(rank, 4).bytes_per_token for rank in range(4)] == [whole.bytes_per_token // 4] * 4
    assert whole.part(0, 1) == whole


def test_part_fewer_heads_than_parts_replicates() -> None:
    """Each part needs at least one head; MLA latents are whole everywhere."""
    assert uniform(4, 2, 64).part(5, 8) == uniform(4, 1, 64)
    latent = Geometry((MLA,) * 3, 16, "bfloat16")
    assert latent.part(7, 8) == latent


def test_part_uneven_raises() -> None:
    """SmolLM2's three heads can't be shared by two."""
    with pytest.raises(ConfigError, match="3 KV heads"):
        uniform(30, 3, 64).part(0, 2)


@pytest.mark.parametrize(
    ("layers", "block", "dtype", "hint"),
    [
        ((), 16, "float32", "layers"),
        ([LayerSpec("full", 1, 2, 2)], 16, "float32", "tuple"),
        ((1, 2), 16, "float32", "LayerSpec"),
        ((LayerSpec("none", 0, 0, 0),), 16, "float32", "nothing to store"),
        ((LayerSpec("full", 1, 2, 2),) * 1025, 16, "float32", "1024"),
        ((LayerSpec("full", 1, 2, 2),), 0, "float32", "block_tokens"),
        ((LayerSpec("full", 1, 2, 2),), 513, "float32", "block_tokens"),
        ((LayerSpec("full", 1, 2, 2),), 16.0, "float32", "block_tokens"),
        ((LayerSpec("full", 1, 2, 2),), 16, "int8", "dtype"),
        ((LayerSpec("full", 64, 256, 256),) * 128, 512, "float32", "block_tokens of at most 255"),
    ],
)
def test_geometry_impossible_raises_with_hint(layers: object, block: object, dtype: str, hint: str) -> None:
    """Wrong sizes must fail at start-up with a message that says what to do."""
    with pytest.raises(ConfigError, match=hint):
        Geometry(layers, block, dtype)  # type: ignore[arg-type]
