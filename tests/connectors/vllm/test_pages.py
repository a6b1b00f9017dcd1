"""Blocks between CPU tensors and payloads: every byte, and none of another block."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvpool.connectors.vllm.device_pages import DevicePages
from kvpool.connectors.vllm.layout import layers_of
from kvpool.connectors.vllm.pages import HostPages, Pages
from kvpool.transport.reach import Bytes

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


class CpuQueue:
    """A device's queue whose work is done at once; it counts what would be waited for."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None

    def wait(self) -> None:
        """Done."""

    def buffer(self, rows: int, nbytes: int) -> torch.Tensor:
        return torch.empty((rows, nbytes), dtype=torch.uint8)

    def reachable(self, payload: Bytes) -> None:
        """It is."""


def staged(tensors: dict[str, torch.Tensor], blocks: int) -> DevicePages:
    """The way of tensors on a device, two blocks a batch."""
    return DevicePages(tensors, blocks, CpuQueue, 2 * sum(layers_of(tensors, blocks).layer_bytes))


@pytest.mark.parametrize("make", [one_storage, storages, uneven])
def test_batches_of_a_device_carry_every_block(make: Callable[[], dict[str, torch.Tensor]]) -> None:
    """Five blocks in batches of two, some of which nobody asks for; the rows of one batch must not be the next one's."""
    source, target = filled(make()), make()
    for tensor in target.values():
        tensor.zero_()
    out, into = staged(source, BLOCKS).out([5, 4, 3, 2, 1]), staged(target, BLOCKS).into([1, 2, 3, 4, 5])
    payload = np.zeros(sum(HostPages(source, BLOCKS).layers.layer_bytes), np.uint8)
    for j in (0, 2, 3, 4):
        out.read(j, payload)
        into.write(j, payload)
    into.settle()
    for name, tensor in target.items():
        axis = list(tensor.shape).index(BLOCKS)
        for j in (0, 2, 3, 4):
            assert torch.equal(tensor.select(axis, 1 + j), source[name].select(axis, 5 - j))
        assert not tensor.index_select(axis, torch.tensor([0, 2])).any()


@pytest.mark.parametrize("make", [one_storage, storages, uneven])
@pytest.mark.parametrize("by_layers", [False, True])
@pytest.mark.parametrize("pages", [HostPages, staged])
def test_block_goes_out_and_into_another(
    pages: Callable[[dict[str, torch.Tensor], int], Pages], make: Callable[[], dict[str, torch.Tensor]], by_layers: bool
) -> None:
    """Block 4 of the copy becomes block 1 of the original; all others stay."""
    source, target = filled(make()), make()
    for tensor in target.values():
        tensor.zero_()
    out, into = pages(source, BLOCKS), pages(target, BLOCKS)
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
