"""Token-exact against `transformers` on fifty mixed prompts: alone, sixteen at a time, and with all that can happen at once."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import pytest

from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.store import BlockStore, MemoryStore, NullStore
from kvpool.request import DecodeRequest, PrefillRequest, TokenOut

Prompts = Callable[..., tuple[int, ...]]
Greedy = Callable[[tuple[int, ...], int], list[int]]
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]
COUNT = 24


@pytest.fixture(scope="module")
def fifty(greedy: Greedy) -> list[tuple[tuple[int, ...], list[int]]]:
    """Prompts of 1 to 180 tokens, most of which begin like others, and what transformers makes of each."""
    rng = random.Random(50)
    trunks = [tuple(rng.choices(range(256), k=120)) for _ in range(4)]
    asked = []
    for _ in range(50):
        shared = rng.choice(trunks)[: rng.choice((0, 0, 7, 16, 40, 64, 120))]
        asked.append((*shared, *rng.choices(range(256), k=rng.randrange(1, 60))))
    return [(prompt, greedy(prompt, COUNT)) for prompt in asked]


async def answer(engine: Engine, prompt: tuple[int, ...], **fields: Any) -> list[int]:
    request = DecodeRequest(request_id="d", prompt=prompt, **{"max_tokens": COUNT, **fields})
    return [event.token async for event in engine.decode(request) if isinstance(event, TokenOut)]


@pytest.mark.parametrize("at_once", [1, 16])
async def test_fifty_prompts_give_the_tokens_of_transformers(engine_of: EngineMaker, fifty: Any, at_once: int) -> None:
    """The engine by itself, one at a time and in batches of sixteen, prefixes shared."""
    async with engine_of(NullStore(), max_active=at_once, resident_bytes=1 << 18) as engine:
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: tuple[int, ...]) -> list[int]:
            async with gate:
                return await answer(engine, prompt)

        answers = await asyncio.gather(*(one(prompt) for prompt, _ in fifty))
    assert answers == [expected for _, expected in fifty]


@pytest.mark.parametrize("layout", ["paged", "vattention"])
async def test_fifty_prompts_under_all_that_can_happen_give_the_tokens_of_transformers(
    engine_of: EngineMaker, model: Model, fifty: Any, layout: str
) -> None:
    """Memory for a few, a pool that fails at times, prefill elsewhere, hang-ups: whoever stays gets its tokens, and memory comes back."""
    rng = random.Random(7)
    store = MemoryStore(model.geometry.bytes_per_token)
    if layout == "vattention":  # a head's part of a block must be whole pages
        model = Model(model._network, replace(model.namespace, geometry=replace(model.geometry, block_tokens=64)))
    room: dict[str, Any] = {"kv_bytes": 300 * 512, "resident_bytes": 1 << 15, "layout": layout, "model": model}

    async def one(prompt: tuple[int, ...], expected: list[int], patience: int) -> bool:
        known: tuple[int, ...] = ()
        if rng.random() < 0.5:
            first, _ = [event async for event in two.prefill(PrefillRequest(request_id="p", prompt=prompt))]
            known = (first.token,)  # type: ignore[union-attr]
        tokens = list(known)
        request = DecodeRequest(request_id="d", prompt=prompt, generated=known, max_tokens=COUNT)
        stream: Any = engine.decode(request)
        async for event in stream:
            store.fail_stores, store.fail_loads_from = rng.random() < 0.1, rng.choice([None, None, None, 2])
            if isinstance(event, TokenOut):
                tokens.append(event.token)
            if len(tokens) == patience:
                await stream.aclose()
                return tokens == expected[:patience]
        return tokens == expected

    async with engine_of(store, max_active=16, **room) as engine, engine_of(store, max_active=4, model=model) as two:
        patience = [rng.choice((99, 99, 99, rng.randrange(2, COUNT))) for _ in fifty]
        right = await asyncio.gather(*(one(prompt, tokens, wait) for (prompt, tokens), wait in zip(fifty, patience, strict=True)))
        assert engine._scheduler.preemptions > 0 or layout != "paged"  # longer blocks: fewer at a time, and none has to give way
        async with asyncio.timeout(20):
            while engine._scheduler.manager.held or engine._scheduler.active:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        engine._scheduler.manager.audit([])
    assert all(right)


async def test_engine_at_full_memory_serves_64_requests(engine_of: EngineMaker, fifty: Any) -> None:
    """Room for two or three of sixty-four that all want more: no deadlock, preempted ones finish right, every block comes back."""
    store: BlockStore = NullStore()
    asked = [fifty[i % 50] for i in range(64)]
    async with engine_of(store, max_active=64, kv_bytes=420 * 512, resident_bytes=0) as engine:
        answers = await asyncio.gather(*(answer(engine, prompt) for prompt, _ in asked))
        assert engine._scheduler.preemptions > 0
        async with asyncio.timeout(20):
            while engine._scheduler.active:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        engine._scheduler.manager.audit([])
    assert answers == [expected for _, expected in asked]
