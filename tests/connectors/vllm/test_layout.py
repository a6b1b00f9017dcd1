"""Where blocks lie in tensors of the shapes that attention backends choose."""

import pytest
import torch

from kvpool.connectors.vllm.layout import Plane, even, layers_of, planes_of
from kvpool.errors import ConfigError


def planes(tensor: torch.Tensor, blocks: int) -> list[Plane]:
    return planes_of(tensor.shape, tensor.stride(), tensor.element_size(), int(tensor.storage_offset()), blocks)


def test_blocks_first_are_one_run_each() -> None:
    """The CPU's: [blocks, heads, tokens, 2 x dim]."""
    assert planes(torch.empty(8, 3, 4, 10, dtype=torch.bfloat16), 8) == [Plane(0, 240, 240, 8)]


def test_keys_and_values_apart_are_two_runs() -> None:
    """[2, blocks, tokens, heads, dim]."""
    assert planes(torch.empty(2, 8, 4, 3, 5, dtype=torch.float16), 8) == [Plane(0, 120, 120, 8), Plane(960, 120, 120, 8)]


def test_order_of_the_axes_within_a_block_does_not_matter() -> None:
    """Heads before tokens in memory, after them in the shape."""
    tensor = torch.empty(8, 3, 4, 10, dtype=torch.bfloat16).permute(0, 2, 1, 3)
    assert planes(tensor, 8) == [Plane(0, 240, 240, 8)]


def test_blocks_split_by_the_backend_stay_together() -> None:
    """Two of the kernel's blocks are one of vLLM's."""
    assert planes(torch.empty(16, 2, 10, dtype=torch.float32), 8) == [Plane(0, 160, 160, 8)]


def test_layers_packed_into_one_tensor_are_told_apart() -> None:
    """A view of every second layer's block, with a gap to the next block."""
    whole = torch.empty(8, 2, 30, dtype=torch.bfloat16)
    assert planes(whole[:, 1], 8) == [Plane(60, 120, 60, 8)]


def test_layout_with_holes_is_refused() -> None:
    """Its bytes can't be taken as one run."""
    with pytest.raises(ConfigError, match="can't be stored"):
        planes(torch.empty(8, 4, 10)[:, :, ::2], 8)
    with pytest.raises(ConfigError, match="doesn't hold 7 blocks"):
        planes(torch.empty(8, 4, 10), 7)


def test_layers_that_share_a_tensor_count_once() -> None:
    """Cross-layer sharing registers one tensor under two names."""
    one, other = torch.empty(8, 6), torch.empty(8, 10)
    layers = layers_of({"a": one, "b": other, "c": one}, 8)
    assert (layers.names, layers.layer_bytes) == (["a", "b"], [24, 40])


def test_recurrent_state_is_refused() -> None:
    """It isn't kept by blocks of tokens."""
    with pytest.raises(ConfigError, match="recurrent state"):
        layers_of({"a": [torch.empty(8, 2), torch.empty(8, 2)]}, 8)


def test_evenly_spaced_planes_are_one_view() -> None:
    """Then a block of all layers is one call."""
    assert even([Plane(0, 10, 10, 8), Plane(100, 10, 10, 8), Plane(200, 10, 10, 8)]) == (Plane(0, 10, 10, 8), 100, 3)
    assert even([Plane(0, 10, 10, 8), Plane(100, 10, 10, 8), Plane(210, 10, 10, 8)]) is None
    assert even([Plane(0, 10, 10, 8), Plane(100, 20, 20, 8)]) is None
