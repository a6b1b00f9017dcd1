"""One layer's shape, its tensor-parallel shares, and the bytes of a list of layers."""

import struct

import pytest

from kvpool.block import LayerSpec
from kvpool.block.layers import MAX_LAYERS, pack_layers, unpack_layers
from kvpool.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("sliding", 1, 64, 64), "kind"),
        (("full", 0, 64, 64), "kv_heads"),
        (("full", 65536, 64, 64), "kv_heads"),
        (("full", 1, 0, 64), "k_dim"),
        (("full", 1, 64, 0), "v_dim"),
        (("full", 1, 64, 64, 128), "window"),
        (("full", True, 64, 64), "int"),
        (("full", 1.0, 64, 64), "int"),
        (("window", 1, 64, 64), "window"),
        (("mla", 2, 576, 0), "latent"),
        (("mla", 1, 576, 64), "latent"),
        (("mla", 1, 576, 0, 4), "window"),
        (("none", 1, 0, 0), "none"),
    ],
)
def test_layer_spec_impossible_raises_with_hint(arguments: tuple[object, ...], hint: str) -> None:
    """A wrong model description must fail where it is written, not as wrong bytes later."""
    with pytest.raises(ConfigError, match=hint):
        LayerSpec(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "size", "shares"),
    [
        (8, 1, [range(8)]),
        (8, 2, [range(4), range(4, 8)]),
        (8, 8, [range(i, i + 1) for i in range(8)]),
        (2, 8, [range(r // 4, r // 4 + 1) for r in range(8)]),
        (1, 3, [range(1)] * 3),
    ],
)
def test_heads_of_part_split_or_replicated(heads: int, size: int, shares: list[range]) -> None:
    """Heads are split evenly; with fewer heads than parts, neighbours share one: the rule the engines follow."""
    spec = LayerSpec("full", heads, 64, 64)
    assert [spec.heads_of_part(rank, size) for rank in range(size)] == shares
    assert [spec.part(rank, size).kv_heads for rank in range(size)] == [len(share) for share in shares]


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (8, 3), (8, 12), (6, 4)])
def test_heads_of_part_uneven_raises(heads: int, size: int) -> None:
    """An uneven split has no right answer; the message says what would have one."""
    with pytest.raises(ConfigError, match=f"divides {heads} or is a multiple"):
        LayerSpec("full", heads, 64, 64).heads_of_part(0, size)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_heads_of_part_rank_outside_raises(rank: int, size: int) -> None:
    """A rank outside its group is a mistake in the deployment."""
    with pytest.raises(ConfigError, match="part"):
        LayerSpec("full", 8, 64, 64).heads_of_part(rank, size)


def test_layers_of_latent_and_none_are_the_same_on_all_parts() -> None:
    """MLA has one latent for all query heads, so every part needs it whole."""
    for spec in (LayerSpec("mla", 1, 576, 0), LayerSpec("none", 0, 0, 0)):
        assert [spec.part(rank, 5) for rank in range(5)] == [spec] * 5


def test_pack_layers_equal_neighbours_take_one_run() -> None:
    """Runs are maximal, so equal models have equal bytes however their list was built."""
    full, window = LayerSpec("full", 8, 64, 64), LayerSpec("window", 8, 64, 64, 128)
    assert len(pack_layers((full,) * 80)) == 14
    assert len(pack_layers((full, window) * 12)) == 24 * 14
    for layers in ((full,) * 80, (full, window) * 12, (full,) * MAX_LAYERS):
        assert unpack_layers(pack_layers(layers)) == layers


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(13),
        struct.pack("<HHHHHI", 0, 1, 1, 1, 1, 0),
        struct.pack("<HHHHHI", 65535, 1, 1, 1, 1, 0),
        struct.pack("<HHHHHI", 1024, 1, 1, 1, 1, 0) + struct.pack("<HHHHHI", 1, 1, 2, 1, 1, 0),
        struct.pack("<HHHHHI", 1, 9, 1, 1, 1, 0),
        struct.pack("<HHHHHI", 1, 1, 0, 1, 1, 0),
        struct.pack("<HHHHHI", 1, 1, 1, 1, 1, 0) * 2,
    ],
    ids=["empty", "short", "no-layers", "too-many", "too-many-in-sum", "unknown-kind", "no-heads", "split-run"],
)
def test_unpack_layers_nonsense_raises(data: bytes) -> None:
    """Stored bytes are checked before a list is built from them, and only one spelling is valid."""
    with pytest.raises(ConfigError):
        unpack_layers(data)
