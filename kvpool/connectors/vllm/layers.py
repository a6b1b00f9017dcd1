"""A load that comes layer by layer, while the forward computes with the layers that are there.

The gate opens layer by layer; what came of the load is known when the forward is over. Where it breaks off, or can't be had so
(`kvpool/client/layered.py`), the blocks are loaded as wholes, and all layers open together.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from kvpool.block import BlockKey
from kvpool.client.layered import LayerTouch
from kvpool.client.transfer import Touch
from kvpool.clock import seconds_left
from kvpool.connectors.vllm.calls import Call, result_of
from kvpool.connectors.vllm.pages import In
from kvpool.transport.reach import Bytes


class Link(Protocol):
    """The pool: see `PoolLink`. Futures always get a result."""

    def load(self, chain: Sequence[BlockKey], first: int, sink: Touch, deadline_ns: int) -> "Future[int]":
        """Deliver the leading run of chain[first:]."""
        ...

    def load_layers(self, chain: Sequence[BlockKey], first: int, sink: LayerTouch, deadline_ns: int) -> "Future[int]":
        """The same layer by layer."""
        ...

    def store(self, chain: Sequence[BlockKey], first: int, fill: Touch, deadline_ns: int) -> "Future[int]":
        """Make chain[first:] present."""
        ...


class LayerGate:
    """For one load, `call`, of chain[first:] into `target`, whose layers have `names`."""

    def __init__(self, names: Sequence[str], call: Call, target: In, deadline_ns: int) -> None:
        self._place = {name: at for at, name in enumerate(names)}
        self._call, self._target, self._deadline_ns = call, target, deadline_ns
        self._changed = threading.Condition()
        self._open = 0

    def start(self, link: Link, chain: Sequence[BlockKey], first: int) -> None:
        """Begin the load."""
        last = len(chain) - 1

        def part(layer: int, index: int, some: Bytes) -> None:
            self._call.check()
            self._target.write_layer(layer, index - first, some)
            if index == last:
                self._target.settle()
                self._opened(layer + 1)

        def whole(index: int, payload: Bytes) -> None:
            self._call.check()
            self._target.write(index - first, payload)

        def came(future: "Future[int]") -> None:
            if result_of(future) == len(chain) - first:
                self._call.follow(future)
            else:
                rest = link.load(chain, first, whole, self._deadline_ns)
                self._call.follow(rest)
                rest.add_done_callback(lambda _: self._opened(len(self._place)))

        link.load_layers(chain, first, part, self._deadline_ns).add_done_callback(came)

    def wait(self, name: str) -> None:
        """Return when the layer is there, or nothing more comes. A layer that nothing is loaded for is there."""
        at = self._place.get(name, -1)
        with self._changed:
            there = self._changed.wait_for(lambda: self._open > at, seconds_left(self._deadline_ns))
        if not there:
            self._call.wait()

    def finish(self) -> None:
        """Return when the load is over."""
        self._call.wait()

    def _opened(self, layers: int) -> None:
        with self._changed:
            self._open = layers
            self._changed.notify_all()
