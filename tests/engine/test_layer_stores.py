"""Stores that deliver layers: one contract, and what the pool's client makes of it with a real node."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from kvpool.block import Geometry, LayerSpec, Namespace, chain_keys
from kvpool.client import AsyncPoolClient
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.streaming import LayerStore
from kvpool.request import DecodeRequest, PrefillRequest, Scope, TokenOut
from kvpool.testing.layer_kit import Layered, LayerStoreKit, soon, write
from kvpool.testing.layered_store import LayeredMemoryStore
from kvpool.testing.node_process import NodeProcess

EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]
_numbers = itertools.count()
SIZE = 16


def small() -> Namespace:
    """Three layers of 2 KV heads; a namespace of its own for each test."""
    geometry = Geometry(tuple(LayerSpec("full", 2, 16, 16) for _ in range(3)), SIZE, "float32")
    return Namespace(model=f"layers-{next(_numbers)}", revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")


@pytest.fixture(autouse=True)
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of these tests are worth no second pass."""
    monkeypatch.setattr("kvpool.client.layered.WORTH_BYTES", 1)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    process = NodeProcess("--capacity", "16MiB")
    yield process
    assert process.stop() == 0, "".join(process.log)


@pytest.fixture
async def pool(node: NodeProcess) -> AsyncIterator[Layered]:
    namespace = small()
    async with await AsyncPoolClient.open(node.address, namespace) as client:
        assert await client.connect() == []
        yield Layered(client, namespace)


class TestInMemory(LayerStoreKit):
    @pytest.fixture
    def layered(self) -> Layered:
        namespace = small()
        return Layered(LayeredMemoryStore(namespace.geometry), namespace)


class TestPool(LayerStoreKit):
    @pytest.fixture
    def layered(self, pool: Layered) -> Layered:
        return pool


async def blocks_of(client: Any, chain: Any, counts: Any) -> int:
    found = await client.layers(chain, 0, counts, deadline_ns=soon())
    blocks: int = found.blocks
    return blocks


async def test_pool_delivers_layers_of_its_own_host_only(node: NodeProcess, pool: Layered) -> None:
    """Over a wire, or where every checksum is to be looked at, blocks come whole: a part has no checksum of its own."""
    written = await write(pool, list(range(3 * SIZE)))
    assert await blocks_of(pool.store, written.chain, written.counts) == 3
    ways: tuple[dict[str, Any], ...] = {"transport": "tcp"}, {"transport": "grpc"}, {"checksums": "always"}
    for options in ways:
        async with await AsyncPoolClient.open(node.address, pool.namespace, **options) as client:
            assert await client.connect() == []
            assert await blocks_of(client, written.chain, written.counts) == 0
            assert await client.load(written.chain, 0, written.counts, lambda index, payload: None, deadline_ns=soon()) == 3


async def test_tenants_layers_are_their_own(pool: Layered) -> None:
    """A tenant's view is a `LayerStore` of that tenant's keys."""
    written = await write(pool, list(range(2 * SIZE)))
    scoped = pool.store.scoped(Scope(tenant="t", salt=b"salt"))
    assert isinstance(scoped, LayerStore)
    theirs = chain_keys(b"t" * 32, list(range(2 * SIZE)), SIZE)
    assert await blocks_of(scoped, theirs, written.counts) == 0


async def test_short_runs_come_whole(pool: Layered, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that waits for layers has no company; a few blocks aren't worth that."""
    written = await write(pool, list(range(2 * SIZE)))
    monkeypatch.setattr("kvpool.client.layered.WORTH_BYTES", sum(p.nbytes for p in written.payloads) + 1)
    assert await blocks_of(pool.store, written.chain, written.counts) == 0


async def test_layers_count_no_more_once_the_node_is_gone() -> None:
    """Who keeps no session keeps no block in place: the layer in which that is noticed never comes to its last part."""
    process, namespace = NodeProcess("--capacity", "16MiB"), small()
    try:
        async with await AsyncPoolClient.open(process.address, namespace) as client:
            assert await client.connect() == []
            written = await write(Layered(client, namespace), list(range(3 * SIZE)))
            came: list[tuple[int, int]] = []

            def sink(layer: int, index: int, part: Any) -> None:
                came.append((layer, index))
                if (layer, index) == (1, 0):
                    process.kill()

            found = await client.layers(written.chain, 0, written.counts, deadline_ns=soon())
            assert found.blocks == 3
            assert not await found.run(sink, deadline_ns=soon())
            assert came == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
            again = await client.layers(written.chain, 0, written.counts, deadline_ns=soon())
            assert again.blocks == 0
    finally:
        process.stop()


async def test_blocks_that_changed_since_they_were_found_do_not_come(node: NodeProcess, pool: Layered) -> None:
    """What is found isn't held yet; what others have pushed out by the time it is wanted fails the run before its first part."""
    written = await write(pool, list(range(3 * SIZE)))
    found = await pool.store.layers(written.chain, 0, written.counts, deadline_ns=soon())
    assert found.blocks == 3
    for round_ in range(40):
        crowd = await write(pool, [10_000 + round_, *range(SIZE * 128 - 1)], seed=round_)
        assert len(crowd.chain) == 128
        if await blocks_of(pool.store, written.chain, written.counts) < 3:
            break
    came: list[int] = []
    assert not await found.run(lambda layer, index, part: came.append(index), deadline_ns=soon())
    assert came == []


async def test_engine_computes_while_layers_come_from_a_real_node(
    node: NodeProcess, model: Model, engine_of: EngineMaker, prompts: Callable[..., tuple[int, ...]], greedy: Callable[..., list[int]]
) -> None:
    """One engine publishes a prefix, another streams it in by layers, counts it as the pool's, and answers as `transformers` does."""
    shared = prompts(96)
    asked = [(*shared, *prompts(length, seed=length)) for length in (1, 9, 40)]
    async with await AsyncPoolClient.open(node.address, model.namespace) as client:
        assert await client.connect() == []
        async with engine_of(client) as one:
            _ = [event async for event in one.prefill(PrefillRequest(request_id="p", prompt=shared))]
        streamed: list[int] = []
        layers = client.layers

        async def counted(*args: Any, **more: Any) -> Any:
            found = await layers(*args, **more)
            streamed.append(found.blocks)
            return found

        client.layers = counted  # type: ignore[method-assign]
        for prompt in asked:
            async with engine_of(client) as engine:
                request = DecodeRequest(request_id="d", prompt=prompt, max_tokens=8)
                events = [event async for event in engine.decode(request)]
                assert [e.token for e in events if isinstance(e, TokenOut)] == greedy(prompt, 8)
                assert events[0].sources.pool >= 96  # type: ignore[union-attr]
                async with asyncio.timeout(10):
                    while engine._scheduler.manager.held:  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
        assert streamed == [12, 12, 12]
