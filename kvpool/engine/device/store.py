"""A `KvStore` in a device's memory. The model's calls read and write it on the main stream, the pool's blocks come and go on two others.

Theory. Whoever fills a block, reads it or gives it back does so in the host's order: `write_block` returns, then the sequence is
computed; a pass returns, then its blocks are offered to the pool, or freed and given to another. On the device that order must be made:

    store after compute      a block is copied out behind the last pass that has returned, and behind the loads so far
    load after last read     a block is overwritten behind the last pass that has returned: who had it before read it no later
    compute after load       what the model does next comes behind the last load that `write_block` has returned from

The last one is said when a layer is written or read, so a pass that waits for layers (`Gate`) waits on the device for those only that have
come, and the next layer's load runs beside the computation of this one. Nothing waits for the pass that is being issued: a load of layer
i + 1 doesn't wait for layer i. The host runs at most one pass ahead of the device (`passed`).
"""

import math
import threading
from collections.abc import Sequence

import numpy as np
import torch

from kvpool.block import Geometry
from kvpool.engine.device.lane import Lane
from kvpool.engine.device.streams import Device, wait_for
from kvpool.engine.paged.blocks import Copy
from kvpool.engine.paged.store import TORCH_DTYPES, Bytes, KvStore, Piece, Planes
from kvpool.errors import ConfigError
from kvpool.units import format_size


class DeviceKvStore(KvStore):
    """KV of `blocks` blocks on `device`. All of the memory is taken at once. Raises `ConfigError` when the device has less."""

    def __init__(self, geometry: Geometry, blocks: int, device: Device) -> None:
        self._device = device
        super().__init__(geometry, blocks)
        nbytes = geometry.payload_bytes(geometry.block_tokens)
        self._loads, self._stores = Lane(device, nbytes), Lane(device, nbytes)
        self._lock = threading.Lock()
        self._passed = self._loaded = self._settled = device.main.record()

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `KvStore.write`."""
        self._settle()
        super().write(layer, slots, keys, values)

    def read(
        self, layer: int, owner: int | None, blocks: Sequence[int], runs: Sequence[Piece], tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KvStore.read`."""
        self._settle()
        return super().read(layer, owner, blocks, runs, tokens)

    def planes(self, runs: Sequence[Piece], tokens: int) -> tuple[Planes, Planes] | None:
        """See `KvStore.planes`."""
        self._settle()
        return super().planes(runs, tokens)

    def copy_block(self, block: int, n_tokens: int, into: Bytes) -> None:
        """See `KvStore.copy_block`. Returns when the bytes are there; raises `LocalError` when the device doesn't bring them."""
        if not into.flags.c_contiguous:
            raise ConfigError("a block is copied into contiguous memory only")
        places = self._places(block, n_tokens)
        with self._stores.slot() as slot:
            host, there = slot.host[: into.nbytes], slot.there[: into.nbytes]

            def work() -> None:
                for place, part in zip(places, self._split(there, n_tokens), strict=True):
                    part.copy_(place)
                host.copy_(there, non_blocking=True)

            with self._lock:
                self._stores.stream.wait(self._passed)
                self._stores.stream.wait(self._loaded)
                self._stores.stream.issue(work)
                slot.done = self._stores.stream.record()
            wait_for(slot.done)
            np.copyto(into.reshape(-1), host.numpy())

    def write_block(self, block: int, n_tokens: int, payload: Bytes, *, first: int = 0) -> None:
        """See `KvStore.write_block`. Returns when `payload` isn't needed any more; the bytes are there for whatever the model does next."""
        places = self._places(block, n_tokens)
        with self._loads.slot() as slot:
            host, there = slot.host[: payload.nbytes], slot.there[: payload.nbytes]
            np.copyto(host.numpy(), payload.reshape(-1))

            def work() -> None:
                there.copy_(host, non_blocking=True)
                for place, part in zip(places, self._split(there, n_tokens), strict=True):
                    place[first : first + len(part)].copy_(part)

            with self._lock:
                self._loads.stream.wait(self._passed)
                self._loads.stream.issue(work)
                slot.done = self._loaded = self._loads.stream.record()

    def copy(self, copies: Sequence[Copy]) -> None:
        """See `KvStore.copy`. Between two passes, on the main stream; what is loaded from now on comes behind it."""
        if not copies:
            return
        self._settle()
        pairs = [(self._places(target, tokens), self._places(source, tokens)) for source, target, tokens in copies]

        def work() -> None:
            for targets, sources in pairs:
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source)

        self._device.main.issue(work)
        with self._lock:
            self._passed = self._device.main.record()

    def passed(self) -> None:
        """See `KvStore.passed`. Waits for the pass before."""
        with self._lock:
            before, self._passed = self._passed, self._device.main.record()
        wait_for(before)

    def close(self) -> None:
        """See `KvStore.close`. The device may still be at work on it: waits until it is not."""
        for event in (self._passed, self._loaded, self._stores.stream.record()):
            wait_for(event)
        super().close()

    def _settle(self) -> None:
        """What the model does next comes behind the loads so far."""
        with self._lock:
            loaded = self._loaded
        if loaded is not self._settled:
            self._device.main.wait(loaded)
            self._settled = loaded

    def _array(self, layers: int, heads: int, dim: int) -> torch.Tensor:
        shape = layers, heads, self.blocks * self.geometry.block_tokens, dim
        try:
            return torch.empty(shape, dtype=TORCH_DTYPES[self.geometry.dtype], device=self._device.place)
        except torch.OutOfMemoryError:
            nbytes = math.prod(shape) * self.geometry.itemsize
            raise ConfigError(
                f"{self._device.place} has no {format_size(nbytes)} for half of the KV: lower --kv-memory or --resident"
            ) from None

    def _places(self, block: int, n_tokens: int) -> tuple[torch.Tensor, ...]:
        """Keys and values of a block in place, ``[layers, kv_heads, n_tokens, dim]``."""
        slots = self._slots(block, n_tokens)
        return tuple(array[:, :, slots] for array in self._arrays)

    def _split(self, payload: torch.Tensor, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in a payload of whole layers, as `_places` shapes them."""
        spec = self.geometry.layers[0]
        rows = payload.view(TORCH_DTYPES[self.geometry.dtype]).view(-1, n_tokens * spec.elements_per_token)
        end = n_tokens * spec.kv_heads * spec.k_dim
        shape = len(rows), spec.kv_heads, n_tokens, -1
        return rows[:, :end].view(shape), rows[:, end:].view(shape)
