"""A memory store that delivers layer by layer, over a link of any speed, and breaks on demand."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from kvpool.block import BlockKey, Geometry
from kvpool.engine.store import MemoryStore, Payload, Sink
from kvpool.engine.streaming import LayerSink
from kvpool.units import SECOND


class _Stream:
    """Blocks that are there, and the store they come from."""

    def __init__(self, store: "LayeredMemoryStore", payloads: list[Payload], first: int) -> None:
        self._store = store
        self._payloads = payloads
        self._first = first

    @property
    def blocks(self) -> int:
        return len(self._payloads)

    async def run(self, sink: LayerSink, *, deadline_ns: int) -> bool:
        layers = len(self._store.geometry.layers)
        for layer in range(layers):
            if layer == self._store.fail_layers_from or time.monotonic_ns() >= deadline_ns:
                return False
            parts = [payload.reshape(layers, -1)[layer] for payload in self._payloads]
            await self._store.transfer(sum(part.nbytes for part in parts))
            for index, part in enumerate(parts, self._first):
                sink(layer, index, part)
        return True


class LayeredMemoryStore(MemoryStore):
    """`MemoryStore` for blocks of `geometry`; every byte takes its time on a link of `bytes_per_s` (0: none).

    With `layered` False its `layers` find nothing, and blocks come whole over the same link. `fail_layers_from`: that layer never comes.
    """

    def __init__(self, geometry: Geometry, *, bytes_per_s: float = 0.0, layered: bool = True) -> None:
        super().__init__(geometry.bytes_per_token)
        self.geometry = geometry
        self.bytes_per_s = bytes_per_s
        self.layered = layered
        self.fail_layers_from: int | None = None
        self.streamed = 0
        """Blocks that were found by `layers`."""
        self._free_ns = 0

    async def transfer(self, nbytes: int) -> None:
        """As long as `nbytes` take on the link, which carries one thing after the other."""
        now_ns = time.monotonic_ns()
        self._free_ns = max(self._free_ns, now_ns) + (round(nbytes / self.bytes_per_s * SECOND) if self.bytes_per_s else 0)
        await asyncio.sleep((self._free_ns - now_ns) / 1e9)

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Sink, *, deadline_ns: int) -> int:
        """Whole blocks, over the link."""
        await self.transfer(sum(self._found(chain, first, counts)[1]))
        return await super().load(chain, first, counts, sink, deadline_ns=deadline_ns)

    async def layers(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], *, deadline_ns: int) -> Any:
        """What is there of the blocks."""
        payloads = self._found(chain, first, counts)[0] if self.layered else []
        self.streamed += len(payloads)
        return _Stream(self, payloads, first)

    def _found(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int]) -> tuple[list[Payload], list[int]]:
        payloads: list[Payload] = []
        for index, count in enumerate(counts, first):
            kept = self.blocks.get(chain[index])
            if kept is None or kept.nbytes != count * self.geometry.bytes_per_token:
                break
            payloads.append(kept)
        return payloads, [payload.nbytes for payload in payloads]
