"""Layers of many blocks, one layer of all blocks after the other, for an engine that computes with one while the next is on its way.

Theory. A checksum covers a block's whole payload, so bytes that came over a wire or off a disk are known to be right when their last layer
has come, not earlier. Only in the memory of a node of this host a part is as good as the whole: the blocks are held, so the node leaves
them where they are, and the board's generations, looked at again behind each layer, say that it has. So layers are delivered from there, if
all that the pool has of the run is there and every block of it was checked before (or written on this host); anything else is for `load`,
which delivers whole blocks.

A layer is one range of a payload, because payloads are layer-major (`Geometry.segments`).
"""

import time
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final

from kvpool.block import BlockKey, Geometry
from kvpool.client import reading
from kvpool.client.core import Core
from kvpool.client.held import Held
from kvpool.client.here import Limits
from kvpool.client.local import LocalReach
from kvpool.client.transfer import Payload
from kvpool.tier.board import BoardReader
from kvpool.units import MIB, MS

WORTH_BYTES: Final = 64 * MIB
"""Less is copied in some 15 ms, which is not worth a pass that has no company."""
LOOK_NS: Final = 100 * MS
"""So long it is asked whether the pool has more of a run elsewhere; a node that says nothing doesn't hold up what is here."""
LayerTouch = Callable[[int, int, Payload], None]


def layer_ranges(geometry: Geometry, n_tokens: int) -> list[slice]:
    """Where each layer that stores something lies in a payload of `n_tokens` tokens."""
    found: list[slice] = []
    for _, group in groupby(geometry.segments(n_tokens), key=lambda segment: segment.layer):
        parts = list(group)
        found.append(slice(parts[0].offset, parts[-1].offset + parts[-1].length))
    return found


class LayerRun:
    """chain[first : first + blocks], found on `board` and about to come layer by layer; of no blocks where there are none."""

    def __init__(
        self, core: Core, place: tuple[LocalReach, BoardReader] | None, keys: Sequence[BlockKey], first: int, counts: Sequence[int]
    ) -> None:
        self._core = core
        self._place = place
        self._keys = keys
        self._first = first
        self._counts = counts

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        return len(self._keys)

    async def run(self, sink: LayerTouch, *, deadline_ns: int) -> bool:
        """`sink(layer, i, part)` in a worker thread for layer 0 of all blocks in order, then layer 1...; False if that broke off.

        What came of a layer may be used when its last block's has come. Parts are read-only and valid during the call.
        """
        return await self._core.in_thread(lambda limits: self._deliver(sink, limits), deadline_ns)

    def _deliver(self, sink: LayerTouch, limits: Limits) -> bool:
        held = None if self._place is None else Held.take(*self._place, self._keys)
        if held is None:
            return False
        with held:
            payloads = list(self._core.here.payloads(held, self._keys, self._counts))
            if len(payloads) < len(self._keys):
                return False
            geometry, last = self._core.namespace.geometry, len(payloads) - 1
            ranges = [layer_ranges(geometry, n) for n in self._counts]
            for layer in range(len(ranges[0])):
                for j, payload in enumerate(payloads[:last]):
                    sink(layer, self._first + j, payload[ranges[j][layer]])
                end = payloads[last][ranges[last][layer]].copy()
                if limits.over() or not held.unchanged():
                    return False
                sink(layer, self._first + last, end)
            held.touch(len(payloads))
        self._core.direct.add("hits", len(payloads))
        return True


async def layers(core: Core, chain: Sequence[BlockKey], first: int, counts: Sequence[int], deadline_ns: int) -> LayerRun:
    """The leading run of chain[first : first + len(counts)], where it can be had by layers and is worth it."""
    await core.links.drop_ended()
    keys = chain[first : first + len(counts)]
    nothing = LayerRun(core, None, (), first, ())
    place, count = _found(core, keys)
    if place is None or sum(map(core.namespace.geometry.payload_bytes, counts[:count])) < WORTH_BYTES:
        return nothing
    if count < len(keys):
        behind = first + count
        until_ns = min(deadline_ns, time.monotonic_ns() + LOOK_NS)
        if await reading.lookup(core, chain[: behind + 1], until_ns, [True] * behind + [False]) > behind:
            return nothing  # the pool has more of it elsewhere
    return LayerRun(core, place, keys[:count], first, counts[:count])


def _found(core: Core, keys: Sequence[BlockKey]) -> tuple[tuple[LocalReach, BoardReader] | None, int]:
    """The node of this host with the longest leading run of blocks that need no checksum, and how long it is."""
    best: tuple[tuple[LocalReach, BoardReader] | None, int] = None, 0
    for reach, board in core.here.reaches():
        count = core.here.trusted(reach, board, keys)
        if count > best[1]:
            best = (reach, board), count
    return best
