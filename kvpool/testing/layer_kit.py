"""The contract of a `LayerStore`, as tests: subclass `LayerStoreKit` and provide a fixture `layered`.

The store under test is a `BlockStore` too; the kit stores blocks in it whole and has them come back by layers.
"""

import time
from typing import NamedTuple, Protocol

import numpy as np
import pytest

from kvpool.block import BlockKey, Namespace, chain_keys
from kvpool.engine.store import BlockStore, Payload
from kvpool.engine.streaming import LayerStore
from kvpool.units import SECOND


class LayeredStore(BlockStore, LayerStore, Protocol):
    """Both."""


class Layered(NamedTuple):
    """A store for blocks of `namespace`."""

    store: LayeredStore
    namespace: Namespace


class Written(NamedTuple):
    """Blocks that a store holds: the chain of their keys, the tokens of each, their payloads."""

    chain: list[BlockKey]
    counts: list[int]
    payloads: list[Payload]


def soon() -> int:
    """A deadline that no test waits for."""
    return time.monotonic_ns() + 20 * SECOND


async def write(layered: Layered, tokens: list[int], seed: int = 0) -> Written:
    """Store the blocks of `tokens`, the partial one included, with random payloads."""
    geometry = layered.namespace.geometry
    chain = chain_keys(layered.namespace.root(), tokens, geometry.block_tokens, tail=True)
    counts = [min(geometry.block_tokens, len(tokens) - i * geometry.block_tokens) for i in range(len(chain))]
    rng = np.random.default_rng(seed)
    payloads = [rng.integers(0, 256, geometry.payload_bytes(n), np.uint8) for n in counts]

    def fill(index: int, into: Payload) -> None:
        np.copyto(into, payloads[index])

    assert await layered.store.store(chain, 0, counts, fill, deadline_ns=soon()) == len(chain)
    return Written(chain, counts, payloads)


class LayerStoreKit:
    """What every `LayerStore` does."""

    @pytest.fixture
    def layered(self) -> Layered:
        """The store under test."""
        raise pytest.UsageError("a subclass of LayerStoreKit has to override `layered`")

    async def test_layers_come_one_after_the_other_and_make_up_the_payloads(self, layered: Layered) -> None:
        """Layer 0 of all blocks in order, then layer 1; a partial block's parts are as short as it is."""
        size = layered.namespace.geometry.block_tokens
        written = await write(layered, list(range(4 * size + 3)))
        calls: list[tuple[int, int]] = []
        parts: dict[int, list[Payload]] = {i: [] for i in range(2, 5)}

        def sink(layer: int, index: int, part: Payload) -> None:
            calls.append((layer, index))
            parts[index].append(part.copy())

        found = await layered.store.layers(written.chain, 2, written.counts[2:], deadline_ns=soon())
        assert found.blocks == 3
        assert await found.run(sink, deadline_ns=soon())
        layers = len(layered.namespace.geometry.layers)
        assert calls == [(layer, index) for layer in range(layers) for index in (2, 3, 4)]
        for index, pieces in parts.items():
            assert np.array_equal(np.concatenate(pieces), written.payloads[index])

    async def test_only_the_leading_run_is_found(self, layered: Layered) -> None:
        """What lies behind a block that nobody has is of no use; where the first is missing there is nothing."""
        size = layered.namespace.geometry.block_tokens
        tokens = list(range(100, 100 + 3 * size))
        written = await write(layered, tokens[: 2 * size])
        chain = chain_keys(layered.namespace.root(), tokens, size)
        found = await layered.store.layers(chain, 0, [size] * 3, deadline_ns=soon())
        assert found.blocks == 2
        came: list[int] = []
        assert await found.run(lambda layer, index, part: came.append(index), deadline_ns=soon())
        assert set(came) == {0, 1}
        assert len(written.chain) == 2
        other = chain_keys(layered.namespace.root(), [7] * size, size)
        assert (await layered.store.layers(other, 0, [size], deadline_ns=soon())).blocks == 0

    async def test_no_layer_counts_after_the_deadline(self, layered: Layered) -> None:
        """A run whose time is over says so, and its last layer isn't delivered to the end."""
        size = layered.namespace.geometry.block_tokens
        written = await write(layered, list(range(200, 200 + 2 * size)))
        found = await layered.store.layers(written.chain, 0, written.counts, deadline_ns=soon())
        came: list[tuple[int, int]] = []
        assert not await found.run(lambda layer, index, part: came.append((layer, index)), deadline_ns=time.monotonic_ns())
        assert (len(layered.namespace.geometry.layers) - 1, 1) not in came
