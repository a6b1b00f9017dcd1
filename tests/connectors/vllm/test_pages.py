"""Blocks between CPU tensors and payloads: every byte, and none of another block."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvpool.connectors.vllm.pages import HostPages

BLOCKS = 6


def one_storage() -> dict[str, torch.Tensor]:
    whole = torch.empty(3, BLOCKS, 2, 4, 10, dtype=torch.bfloat16)
    return {f"layer{n}": whole[n] for n in range(3)}


def storages() -> dict[str, torch.Tensor]:
    return {f"layer{n}": torch.empty(2, BLOCKS, 4, 2, 5, dtype=torch.float32) for n in range(3)}


def uneven() -> dict[str, torch.Tensor]:
    return {"wide": torch.empty(BLOCKS, 4, 16, dtype=torch.float16), "narrow": torch.empty(BLOCKS, 4, 6, dtype=torch.float16)}


def filled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for number, tensor in enumerate(tensors.values()):
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) % 251 + number)
    return tensors


@pytest.mark.parametrize("make", [one_storage, storages, uneven])
@pytest.mark.parametrize("by_layers", [False, True])
def test_block_goes_out_and_into_another(make: Callable[[], dict[str, torch.Tensor]], by_layers: bool) -> None:
    """Block 4 of the copy becomes block 1 of the original; all others stay."""
    source, target = filled(make()), make()
    for tensor in target.values():
        tensor.zero_()
    out, into = HostPages(source, BLOCKS), HostPages(target, BLOCKS)
    payload = np.zeros(sum(out.layers.layer_bytes), np.uint8)
    out.out([1]).read(0, payload)
    sink = into.into([0, 4])
    if by_layers:
        at = 0
        for layer, nbytes in enumerate(into.layers.layer_bytes):
            sink.write_layer(layer, 1, payload[at : at + nbytes])
            at += nbytes
    else:
        sink.write(1, payload)
    sink.settle()
    for name, tensor in target.items():
        axis = list(tensor.shape).index(BLOCKS)
        assert torch.equal(tensor.select(axis, 4), source[name].select(axis, 1))
        assert not tensor.index_select(axis, torch.tensor([0, 1, 2, 3, 5])).any()


def test_payload_is_layer_by_layer() -> None:
    """So that one layer of it is one range."""
    tensors = filled(one_storage())
    pages = HostPages(tensors, BLOCKS)
    payload = np.empty(sum(pages.layers.layer_bytes), np.uint8)
    pages.out([3]).read(0, payload)
    second = payload[pages.layers.layer_bytes[0] :][: pages.layers.layer_bytes[1]]
    assert second.tobytes() == tensors["layer1"][3].view(torch.uint8).numpy().tobytes()
