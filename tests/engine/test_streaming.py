"""KV that comes layer by layer while it is computed with: the same tokens, less waiting, and nothing attended to that didn't come."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from time import monotonic_ns

import pytest

from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.streaming import LayerGate, LayersMissingError
from kvpool.request import DecodeRequest, FirstToken, PrefillRequest, TokenOut, TokenSources
from kvpool.testing.layered_store import LayeredMemoryStore
from kvpool.units import SECOND

Prompts = Callable[..., tuple[int, ...]]
Greedy = Callable[[tuple[int, ...], int], list[int]]
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture
def store(model: Model) -> LayeredMemoryStore:
    return LayeredMemoryStore(model.geometry)


async def first_of(engine: Engine, prompt: tuple[int, ...]) -> FirstToken:
    first, *_ = [event async for event in engine.prefill(PrefillRequest(request_id="p", prompt=prompt))]
    assert isinstance(first, FirstToken)
    return first


async def test_layers_that_come_while_they_are_computed_with_give_the_same_tokens(
    engine_of: EngineMaker, store: LayeredMemoryStore, prompts: Prompts, greedy: Greedy
) -> None:
    """Streaming is a matter of time only; blocks whose layers have come are shared like any others."""
    shared = prompts(96)
    asked = [(*shared, *prompts(length, seed=length)) for length in (1, 9, 40)]
    async with engine_of(store) as one:
        await first_of(one, shared)
    async with engine_of(store, resident_bytes=1 << 20) as engine:
        for prompt in asked:
            request = DecodeRequest(request_id="d", prompt=prompt, max_tokens=8)
            assert [e.token async for e in engine.decode(request) if isinstance(e, TokenOut)] == greedy(prompt, 8)
        again = await first_of(engine, asked[1])
    assert store.streamed == 12
    assert again.sources.resident >= 96


async def test_layers_that_do_not_come_are_computed(
    engine_of: EngineMaker, store: LayeredMemoryStore, prompts: Prompts, greedy: Greedy
) -> None:
    """A pass that waited in vain is dropped with all that came; the request only loses time, and what it computes is published."""
    prompt = prompts(77)
    async with engine_of(store) as one:
        await first_of(one, prompt)
    for layer in (0, 1):
        store.fail_layers_from = layer
        async with engine_of(store) as engine:
            first = await first_of(engine, prompt)
            async with asyncio.timeout(10):
                while engine._scheduler.active:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            engine._scheduler.manager.audit([])
        assert first.token == greedy(prompt, 1)[0]
        assert first.sources == TokenSources(computed=77)


async def test_request_that_streams_shares_the_engine_and_may_hang_up(
    engine_of: EngineMaker, store: LayeredMemoryStore, prompts: Prompts, greedy: Greedy
) -> None:
    """Others decode between its passes; who leaves while layers come leaves no block behind."""
    prompt = prompts(96)
    async with engine_of(store) as one:
        await first_of(one, prompt)
    store.bytes_per_s = 96 * store.geometry.bytes_per_token / 0.2
    async with engine_of(store) as engine:
        other = asyncio.create_task(_tokens(engine, prompts(9, seed=3), 30))
        leaver = asyncio.create_task(first_of(engine, (*prompt, 7)))
        stayer = asyncio.create_task(first_of(engine, (*prompt, 8, 9)))
        await asyncio.sleep(0.05)
        leaver.cancel()
        assert (await stayer).token == greedy((*prompt, 8, 9), 1)[0]
        assert await other == greedy(prompts(9, seed=3), 30)
        await asyncio.gather(leaver, return_exceptions=True)
        async with asyncio.timeout(10):
            while engine._scheduler.manager.held:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        engine._scheduler.manager.audit([])


async def _tokens(engine: Engine, prompt: tuple[int, ...], count: int) -> list[int]:
    request = DecodeRequest(request_id="d", prompt=prompt, max_tokens=count)
    return [event.token async for event in engine.decode(request) if isinstance(event, TokenOut)]


def test_gate_opens_layer_by_layer_and_never_for_what_did_not_come() -> None:
    """An engine never attends to unfilled blocks."""
    gate = LayerGate(monotonic_ns() + SECOND)
    gate.reached(2)
    gate.wait(0)
    gate.wait(1)
    gate.fail()
    gate.wait(1)
    with pytest.raises(LayersMissingError):
        gate.wait(2)
    with pytest.raises(LayersMissingError):
        LayerGate(monotonic_ns()).wait(0)
