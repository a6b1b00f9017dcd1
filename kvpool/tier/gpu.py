"""A GPU's memory as a region: one torch allocation, and copies through pinned staging memory.

Theory. A copy engine reads and writes host memory by itself only where pages are pinned, and pinning costs far more than the copy. So a
*lane* keeps two pinned buffers and a stream of its own. While the engine moves one buffer, the host copies the other, so a long transfer
runs at the speed of the slower of the two, not of their sum. A transfer is over when its call returns.

Over CPU tensors the same steps run in the same order; staging is then ordinary memory and a copy is done at once.

torch is imported when a region is made, not with this module, and by name: a node without a GPU tier needs no torch.
"""

import errno
import importlib
import logging
import queue
from types import ModuleType
from typing import Any, Final

from kvpool.errors import ClosedError, ConfigError
from kvpool.policy.eviction import EvictionPolicy
from kvpool.tier.contract import DEFAULT_MAX_OBJECTS
from kvpool.tier.index import Space
from kvpool.tier.memory import MemoryTier
from kvpool.tier.pages import Bytes
from kvpool.tier.region import check_range
from kvpool.units import MIB, format_size

log = logging.getLogger(__name__)

STAGING_BYTES: Final = 4 * MIB
"""Bytes of one staging buffer; a lane has two."""

LANES: Final = 4
"""Transfers that run at once; more wait for a lane."""

LANE_WAIT_S: Final = 30.0
"""How long a transfer waits for a lane before the device counts as stuck."""


class _Lane:
    """Two staging buffers and what tells when the device is done with each."""

    def __init__(self, torch: ModuleType, device: Any, staging_bytes: int) -> None:
        self._torch = torch
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.tensors = [torch.empty(staging_bytes, dtype=torch.uint8, pin_memory=self._stream is not None) for _ in range(2)]
        self.arrays: list[Bytes] = [tensor.numpy() for tensor in self.tensors]
        self._done: list[Any] = [None, None]

    def copy(self, into: Any, source: Any, half: int) -> None:
        """Begin to copy one tensor to the other; `wait(half)` tells when it is done."""
        if self._stream is None:
            into.copy_(source)
            return
        with self._torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
            self._done[half] = self._stream.record_event()

    def wait(self, half: int) -> None:
        """Until the last copy with this buffer is done."""
        if self._done[half] is not None:
            self._done[half].synchronize()
            self._done[half] = None

    def settle(self) -> None:
        """After a failed transfer: wait for what still runs, so that nothing writes into a buffer that is used again."""
        if self._stream is not None:
            self._stream.synchronize()
        self._done = [None, None]


class GpuRegion:
    """`Region` of `capacity` bytes on `device`: `cuda`, `cuda:1`... or `cpu`.

    Raises `ConfigError` when there is no such device, not that much memory on it, or no torch.
    """

    def __init__(self, capacity: int, device: str, *, staging_bytes: int = STAGING_BYTES, lanes: int = LANES) -> None:
        if capacity < 1 or staging_bytes < 1 or lanes < 1:
            raise ConfigError("a GPU region needs at least one byte, one byte of staging and one lane")
        torch = _torch()
        place = _device(torch, device)
        try:
            self._memory: Any = torch.empty(capacity, dtype=torch.uint8, device=place)
            self._lanes: queue.LifoQueue[_Lane] = queue.LifoQueue()
            for _ in range(lanes):
                self._lanes.put(_Lane(torch, place, min(staging_bytes, capacity)))
            if place.type == "cuda":
                torch.cuda.synchronize(place)
        except RuntimeError as error:  # torch's own out-of-memory error is one
            wanted = format_size(capacity)
            raise ConfigError(f"can't take {wanted} on {device}: {error}; lower the GPU tier's capacity or free the device") from error
        self._capacity, self._device = capacity, device

    @property
    def capacity(self) -> int:
        """Bytes."""
        return self._capacity

    def write(self, offset: int, data: Bytes) -> None:
        """Copy in; over when it returns. Raises `OSError` when the device fails or is stuck."""
        memory = self._open_memory()
        check_range(offset, data.size, self._capacity)
        lane = self._lane()
        try:
            step = lane.arrays[0].size
            for number, start in enumerate(range(0, data.size, step)):
                half, length = number % 2, min(step, data.size - start)
                lane.wait(half)
                lane.arrays[half][:length] = data[start : start + length]
                lane.copy(memory[offset + start : offset + start + length], lane.tensors[half][:length], half)
            lane.wait(0)
            lane.wait(1)
        except RuntimeError as error:
            raise self._failed(lane, error) from error
        finally:
            self._lanes.put(lane)

    def read(self, offset: int, into: Bytes) -> None:
        """Copy out. Raises `OSError` when the device fails or is stuck."""
        memory = self._open_memory()
        check_range(offset, into.size, self._capacity)
        lane = self._lane()
        try:
            step, before = lane.arrays[0].size, 0
            for number, start in enumerate(range(0, into.size, step)):
                half, length = number % 2, min(step, into.size - start)
                lane.copy(lane.tensors[half][:length], memory[offset + start : offset + start + length], half)
                if number:
                    _take(lane, 1 - half, into[before:start])
                before = start
            if into.size:
                _take(lane, ((into.size - 1) // step) % 2, into[before:])
        except RuntimeError as error:
            raise self._failed(lane, error) from error
        finally:
            self._lanes.put(lane)

    def flush(self, offset: int, length: int) -> None:
        """Nothing to do: a write is over when it returns."""
        check_range(offset, length, self._capacity)

    def invalidate(self, offset: int, length: int) -> None:
        """Nothing to do: a read asks the device."""
        check_range(offset, length, self._capacity)

    def close(self) -> None:
        """Let the device memory go, with the last transfer that runs."""
        self._memory = None

    def _open_memory(self) -> Any:
        memory = self._memory
        if memory is None:
            raise ClosedError("this region is closed")
        return memory

    def _lane(self) -> _Lane:
        try:
            return self._lanes.get(timeout=LANE_WAIT_S)
        except queue.Empty as error:
            raise OSError(errno.ETIMEDOUT, f"{self._device} finished no transfer within {LANE_WAIT_S:.0f} s") from error

    def _failed(self, lane: _Lane, error: RuntimeError) -> OSError:
        try:
            lane.settle()
        except RuntimeError as again:
            log.warning("%s fails also to settle: %s", self._device, again)
        return OSError(errno.EIO, f"{self._device}: {error}")


def open_gpu_tier(
    capacity_bytes: int, device: str, *, space: Space, policy: EvictionPolicy, max_objects: int = DEFAULT_MAX_OBJECTS
) -> MemoryTier:
    """A tier named `gpu` of `capacity_bytes` on `device`; `space` and `policy` are fresh and become the tier's.

    Takes the memory now. Raises `ConfigError` as `GpuRegion` does.
    """
    region = GpuRegion(capacity_bytes, device)
    log.info("gpu tier: %s on %s", format_size(capacity_bytes), device)
    return MemoryTier(region, space, policy, name="gpu", max_objects=max_objects)


def _take(lane: _Lane, half: int, into: Bytes) -> None:
    lane.wait(half)
    into[:] = lane.arrays[half][: into.size]


def _torch() -> ModuleType:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError("a GPU tier needs torch: install kvpool[worker], or leave the GPU tier out") from error


def _device(torch: ModuleType, name: str) -> Any:
    """The torch device called `name`, known to be there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"no such device: {name!r}; say cuda, cuda:0... or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"a GPU tier can't lie on {name!r}: say cuda, cuda:0... or cpu")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"there is no {name} here: torch sees {torch.cuda.device_count()} CUDA devices; leave the GPU tier out")
    return device
