"""The engine's KV on a device as bytes: blocks are gathered into rows of a staging tensor by one indexed copy per layer, and back.

    out   gather a batch of blocks on the device, then each row to its payload, by the copy engine, page-locked if that can be
    in    payloads to a page-locked buffer while they may be read, then a batch to the device by one copy, and scatter it there

All of it runs on a queue (a CUDA stream) of its own, behind what the engine's stream was given so far: saves read what the step computed,
loads write to blocks that an earlier step may still read.

A batch takes at most `STAGE_BYTES` of the device's memory, for each call under way, and as much page-locked memory for a load.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from kvpool.connectors.vllm.layout import Plane, layers_of
from kvpool.transport.cuda import cuda_of
from kvpool.transport.device import Device, Pins
from kvpool.transport.reach import Bytes
from kvpool.units import MIB

STAGE_BYTES = 64 * MIB


class Queue(Protocol):
    """A device's queue of work: a context in which work goes to it, behind the engine's."""

    def __enter__(self) -> object: ...

    def __exit__(self, *exc: object) -> object: ...

    def wait(self) -> None:
        """Until all of it is done."""
        ...

    def buffer(self, rows: int, nbytes: int) -> Any:
        """A uint8 tensor `[rows, nbytes]` in host memory that the device can read by itself."""
        ...

    def reachable(self, payload: Bytes) -> None:
        """See that the device can write to the memory that `payload` is part of by itself, if that is possible."""
        ...


class CudaQueue:
    """A CUDA stream behind the current one. `pins` and `device` page-lock arenas."""

    def __init__(self, torch_device: Any, pins: Pins, device: Device) -> None:
        self._pins, self._device = pins, device
        cuda: Any = torch.cuda
        self._cuda, self._stream = cuda, cuda.Stream(torch_device)
        self._stream.wait_stream(cuda.current_stream(torch_device))

    def __enter__(self) -> object:
        self._inside: Any = self._cuda.stream(self._stream)
        return self._inside.__enter__()

    def __exit__(self, *exc: object) -> object:
        return self._inside.__exit__(*exc)

    def wait(self) -> None:
        """See `Queue`."""
        self._stream.synchronize()

    def buffer(self, rows: int, nbytes: int) -> Any:
        """See `Queue`."""
        return torch.empty((rows, nbytes), dtype=torch.uint8, pin_memory=True)

    def reachable(self, payload: Bytes) -> None:
        """See `Queue`."""
        self._pins.lock(payload, self._device)


class DevicePages:
    """`Pages` over device tensors by layer name, `blocks` blocks each; `queue` makes a queue behind what the calling thread has queued.

    Raises `ConfigError` for a layout that can't be stored.
    """

    def __init__(self, tensors: Mapping[str, Any], blocks: int, queue: Callable[[], Queue], stage_bytes: int = STAGE_BYTES) -> None:
        self.layers = layers_of(tensors, blocks)
        self.queue = queue
        memory = {tensor.untyped_storage().data_ptr(): _bytes(tensor) for tensor in tensors.values()}
        places = zip(self.layers.storages, self.layers.planes, strict=True)
        self.planes = [_rows(memory[at], plane) for at, some in places for plane in some]
        self.block_bytes = sum(self.layers.layer_bytes)
        self.batch = max(1, stage_bytes // self.block_bytes)

    def out(self, block_ids: Sequence[int]) -> "DeviceOut":
        """See `Pages`."""
        return DeviceOut(self, block_ids)

    def into(self, block_ids: Sequence[int]) -> "DeviceIn":
        """See `Pages`."""
        return DeviceIn(self, block_ids)

    def index(self, block_ids: Sequence[int]) -> Any:
        """Numbers of blocks, on the device."""
        return torch.tensor(block_ids, device=self.planes[0].device)


class DeviceOut:
    """`Out` over some blocks: a batch is gathered when its first block is asked for."""

    def __init__(self, pages: DevicePages, block_ids: Sequence[int]) -> None:
        self._pages, self._ids, self._queue = pages, list(block_ids), pages.queue()
        self._first, self._rows = -1, torch.empty(0)

    def read(self, j: int, payload: Bytes) -> None:
        """See `Out`."""
        pages, first = self._pages, j // self._pages.batch * self._pages.batch
        self._queue.reachable(payload)
        with torch.inference_mode(), self._queue:
            if first != self._first:
                index = pages.index(self._ids[first : first + pages.batch])
                self._rows = torch.cat([plane.index_select(0, index) for plane in pages.planes], dim=1)
                self._first = first
            torch.from_numpy(payload).copy_(self._rows[j - first], non_blocking=True)
        self._queue.wait()


class DeviceIn:
    """`In` over some blocks: rows go to the device and are scattered when a batch is full, and by `settle`."""

    def __init__(self, pages: DevicePages, block_ids: Sequence[int]) -> None:
        self._pages, self._ids, self._queue = pages, list(block_ids), pages.queue()
        self._buffer: Any = None
        self._rows: Any = None
        self._filled: list[int] = []

    def write(self, j: int, payload: Bytes) -> None:
        """See `In`."""
        if self._buffer is None:
            pages, count = self._pages, min(self._pages.batch, len(self._ids))
            self._buffer = self._queue.buffer(count, pages.block_bytes)
            self._rows = torch.empty((count, pages.block_bytes), dtype=torch.uint8, device=pages.planes[0].device)
        elif not self._filled:
            self._queue.wait()  # the buffer may be read still
        np.copyto(self._buffer[len(self._filled)].numpy(), payload)
        self._filled.append(self._ids[j])
        if len(self._filled) == len(self._buffer):
            self._scatter()

    def write_layer(self, layer: int, j: int, part: Bytes) -> None:
        """See `In`."""
        first, at = sum(len(some) for some in self._pages.layers.planes[:layer]), 0
        with torch.inference_mode(), self._queue:
            for plane in self._pages.planes[first : first + len(self._pages.layers.planes[layer])]:
                plane[self._ids[j]].copy_(torch.from_numpy(part[at : at + plane.shape[1]].copy()), non_blocking=True)
                at += plane.shape[1]
        self._queue.wait()

    def settle(self) -> None:
        """See `In`."""
        self._scatter()
        self._queue.wait()

    def _scatter(self) -> None:
        count, at = len(self._filled), 0
        if not count:
            return
        with torch.inference_mode(), self._queue:
            index = self._pages.index(self._filled)
            self._rows[:count].copy_(self._buffer[:count], non_blocking=True)
            for plane in self._pages.planes:
                plane.index_copy_(0, index, self._rows[:count, at : at + plane.shape[1]])
                at += plane.shape[1]
        self._filled = []


def cuda_pages(tensors: Mapping[str, Any], blocks: int) -> DevicePages:
    """The pages of CUDA tensors."""
    one = next(iter(tensors.values()))
    device, pins = cuda_of(one), Pins()
    return DevicePages(tensors, blocks, lambda: CudaQueue(one.device, pins, device))


def _bytes(tensor: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _rows(memory: Any, plane: Plane) -> Any:
    return memory.as_strided((plane.blocks, plane.nbytes), (plane.step, 1), plane.start)
