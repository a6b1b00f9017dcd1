"""Layer by layer: a sequence is computed while its KV still comes, layer i + 1 on its way while layer i is attended to.

Theory. To compute the tokens behind a prefix, layer i needs the prefix's KV of layer i only, and needs it only when its turn comes. So a
load that delivers all blocks' first layers, then all blocks' second ones, hides behind the computation but for its first layer: what takes
transfer + compute becomes little more than the longer of the two. A pass over a sequence whose layers still come waits for each of them
at a `Gate`, on the compute thread, so such a sequence has its pass to itself, and no longer than until the load's deadline. If a layer
doesn't come (late, lost, damaged), the pass is dropped, the prefix with it, and all is computed as if nothing had been found.

A store that can deliver layers is a `LayerStore`; from others blocks come whole, before the first pass. The pool's client is one for
blocks in the memory of a node of this host (`kvpool/client/layered.py`): only there can a part of a block be known to be right before
the whole is.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from kvpool.block import BlockKey
from kvpool.engine.store import Payload
from kvpool.errors import UnavailableError

LayerSink = Callable[[int, int, Payload], None]
"""Called as sink(layer, i, part) with the validated KV of `layer` in chain[i]: the payload's bytes of that layer.

What came of a layer may be used when its last block's part has come. `part` is valid only during the call.
"""


class LayersMissingError(UnavailableError):
    """A layer that a pass waited for did not come."""


class LayerStream(Protocol):
    """The leading run of some blocks, about to come layer by layer."""

    @property
    def blocks(self) -> int:
        """How many blocks it holds."""
        ...

    async def run(self, sink: LayerSink, *, deadline_ns: int) -> bool:
        """Deliver layer 0 of all blocks in order, then layer 1...; False when it ended before the last one. Calls as of a `BlockStore`."""
        ...


@runtime_checkable
class LayerStore(Protocol):
    """A block store that can deliver layers."""

    async def layers(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], *, deadline_ns: int) -> LayerStream:
        """The leading run of chain[first : first + len(counts)] that can be had."""
        ...


class LayerGate:
    """Lets a pass through to each layer when its KV is there, until `deadline_ns`."""

    def __init__(self, deadline_ns: int) -> None:
        self._deadline_ns = deadline_ns
        self._changed = threading.Condition()
        self._there = 0
        self._broken = False
        self.waited_ns = 0

    def reached(self, layers: int) -> None:
        """The first `layers` layers are there."""
        with self._changed:
            self._there = layers
            self._changed.notify_all()

    def fail(self) -> None:
        """No more will come."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        """Return when `layer` is there. Raises `LayersMissingError` when it won't come, or not in time."""
        began_ns = time.monotonic_ns()
        with self._changed:
            left_s = max(0.0, (self._deadline_ns - began_ns) / 1e9)
            came = self._changed.wait_for(lambda: self._there > layer or self._broken, left_s) and self._there > layer
        self.waited_ns += time.monotonic_ns() - began_ns
        if not came:
            raise LayersMissingError(f"layer {layer} of a loaded prefix did not come")
