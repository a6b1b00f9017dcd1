"""Many sequences of one prefix on one worker: one load, one computation, whatever becomes of who began it; always the right tokens."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import kvpool.engine.patience
import kvpool.engine.prefill
from kvpool.block import BlockKey, chain_keys
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.store import MemoryStore, NullStore, Sink
from kvpool.request import DecodeRequest, PrefillRequest, Started, TokenOut, TokenSources
from kvpool.testing.layered_store import LayeredMemoryStore
from kvpool.units import MIB, MS

BLOCK, SHARED, COUNT = 8, 160, 6
Prompts = Callable[..., tuple[int, ...]]
Greedy = Callable[[tuple[int, ...], int], list[int]]
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]


class StepStore(MemoryStore):
    """Loads deliver a block each time the test lets them, or all when it sets `go`."""

    def __init__(self, bytes_per_token: int) -> None:
        super().__init__(bytes_per_token)
        self.go = threading.Event()
        self.go.set()
        self.steps = threading.Semaphore(0)
        self.running = 0

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Sink, *, deadline_ns: int) -> int:
        def deliver(index: int, payload: Any) -> None:
            while not self.go.is_set() and not self.steps.acquire(timeout=0.01):
                pass
            sink(index, payload)

        self.running += 1
        return await asyncio.to_thread(self._load, list(chain), first, list(counts), deliver)


@pytest.fixture
def store(model: Model) -> StepStore:
    return StepStore(model.geometry.bytes_per_token)


@pytest.fixture
def asked(prompts: Prompts) -> list[tuple[int, ...]]:
    """One prefix of whole blocks, and a few tokens of each one's own."""
    return [(*prompts(SHARED), *prompts(3 + number, seed=100 + number)) for number in range(COUNT)]


async def answer(engine: Engine, prompt: tuple[int, ...], count: int = 6) -> tuple[TokenSources, list[int]]:
    started, *events = [event async for event in engine.decode(DecodeRequest(request_id="d", prompt=prompt, max_tokens=count))]
    assert isinstance(started, Started)
    return started.sources, [event.token for event in events if isinstance(event, TokenOut)]


async def fill(engine_of: EngineMaker, store: MemoryStore, prompt: tuple[int, ...]) -> None:
    """The store holds the blocks of `prompt`."""
    async with engine_of(store) as one:
        async for _ in one.prefill(PrefillRequest(request_id="p", prompt=prompt)):
            pass
    store.loads.clear()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def settled(engine: Engine) -> None:
    """Everybody has left, and nothing is held, claimed or waited for."""
    manager = engine._scheduler.manager
    await until(lambda: manager.held == engine._scheduler.active == len(engine._parts.sharing) == 0)
    manager.audit([])


async def test_prefix_in_the_pool_is_loaded_once_for_all(
    engine_of: EngineMaker, store: StepStore, asked: list[tuple[int, ...]], greedy: Greedy
) -> None:
    """The first one loads it, the others find it in the worker; each loads no more than its own."""
    await fill(engine_of, store, asked[0][:SHARED])
    async with engine_of(store, resident_bytes=MIB) as engine:
        answers = await asyncio.gather(*(answer(engine, prompt) for prompt in asked))
        await settled(engine)
    assert [tokens for _, tokens in answers] == [greedy(prompt, 6) for prompt in asked]
    assert sorted(sources.pool for sources, _ in answers) == [0] * (COUNT - 1) + [SHARED]
    assert sum(sources.computed for sources, _ in answers) == sum(len(prompt) - SHARED for prompt in asked)
    assert sum(done for _, _, done in store.loads) == SHARED // BLOCK


async def test_cold_prefix_is_computed_once_for_all(engine_of: EngineMaker, asked: list[tuple[int, ...]], greedy: Greedy) -> None:
    """Without a pool too: who comes while it is computed gets it block by block."""
    async with engine_of(NullStore(), resident_bytes=MIB) as engine:
        answers = await asyncio.gather(*(answer(engine, prompt) for prompt in asked))
        await settled(engine)
    assert [tokens for _, tokens in answers] == [greedy(prompt, 6) for prompt in asked]
    assert sum(sources.computed for sources, _ in answers) == SHARED + sum(len(prompt) - SHARED for prompt in asked)


async def test_same_prompt_many_times_is_computed_once_but_for_its_last_block(
    engine_of: EngineMaker, prompts: Prompts, greedy: Greedy
) -> None:
    """Each needs the scores of its own last token; a prompt that ends with a block shares all the others."""
    prompt = prompts(SHARED)
    async with engine_of(NullStore(), resident_bytes=MIB) as engine:
        answers = await asyncio.gather(*(answer(engine, prompt) for _ in range(4)))
        await settled(engine)
    assert [tokens for _, tokens in answers] == [greedy(prompt, 6)] * 4
    assert sorted(sources.computed for sources, _ in answers) == [BLOCK] * 3 + [SHARED]


@pytest.mark.parametrize("came", [0, 5])
async def test_load_outlasts_the_request_that_began_it(
    engine_of: EngineMaker, store: StepStore, asked: list[tuple[int, ...]], greedy: Greedy, came: int
) -> None:
    """A caller who hangs up takes nothing from those that wait for the same blocks."""
    await fill(engine_of, store, asked[0][:SHARED])
    store.go.clear()
    async with engine_of(store, resident_bytes=MIB) as engine:
        first, *rest = [asyncio.create_task(answer(engine, prompt)) for prompt in asked]
        for _ in range(came):
            store.steps.release()
        await until(lambda: engine._parts.sharing.waiting == COUNT - 1)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        store.go.set()
        answers = await asyncio.gather(*rest)
        await settled(engine)
    assert [tokens for _, tokens in answers] == [greedy(prompt, 6) for prompt in asked[1:]]
    assert all(sources.pool == 0 and sources.resident == SHARED for sources, _ in answers)
    assert [done for first_, _, done in store.loads if first_ == 0] == [SHARED // BLOCK]


async def test_load_that_nobody_waits_for_any_more_ends(engine_of: EngineMaker, store: StepStore, asked: list[tuple[int, ...]]) -> None:
    """The last one to hang up ends it."""
    await fill(engine_of, store, asked[0][:SHARED])
    store.go.clear()
    async with engine_of(store, resident_bytes=MIB) as engine:
        tasks = [asyncio.create_task(answer(engine, prompt)) for prompt in asked]
        await until(lambda: engine._parts.sharing.waiting == COUNT - 1)
        for task in tasks:
            task.cancel()
            await asyncio.wait([task])
        await until(lambda: len(engine._parts.sharing) == 0)
        store.go.set()
        await settled(engine)


async def test_load_that_fails_in_the_middle_is_completed_once(
    engine_of: EngineMaker, store: StepStore, asked: list[tuple[int, ...]], greedy: Greedy
) -> None:
    """What has come is shared, and what hasn't is computed by the first one for all."""
    await fill(engine_of, store, asked[0][:SHARED])
    store.fail_loads_from = 7
    async with engine_of(store, resident_bytes=MIB) as engine:
        answers = await asyncio.gather(*(answer(engine, prompt) for prompt in asked))
        await settled(engine)
    assert [tokens for _, tokens in answers] == [greedy(prompt, 6) for prompt in asked]
    assert sum(sources.computed for sources, _ in answers) == SHARED - 7 * BLOCK + sum(len(prompt) - SHARED for prompt in asked)


async def test_load_that_is_too_slow_is_given_up_and_computed_once(
    engine_of: EngineMaker, store: StepStore, asked: list[tuple[int, ...]], greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for another's load has the limits of one's own; whoever takes the blocks over does so for all."""
    await fill(engine_of, store, asked[0][:SHARED])
    for module in (kvpool.engine.prefill, kvpool.engine.patience):
        monkeypatch.setattr(module, "LOAD_FLOOR_NS", 50 * MS)
    store.go.clear()
    async with engine_of(store, resident_bytes=MIB) as engine:
        answers = await asyncio.gather(*(answer(engine, prompt) for prompt in asked))
        store.go.set()
        await settled(engine)
    assert [tokens for _, tokens in answers] == [greedy(prompt, 6) for prompt in asked]
    assert sum(sources.computed for sources, _ in answers) <= 2 * SHARED + sum(len(prompt) - SHARED for prompt in asked)


async def test_computation_whose_request_hangs_up_is_taken_over(
    engine_of: EngineMaker, asked: list[tuple[int, ...]], greedy: Greedy
) -> None:
    """Of those that waited the first one goes on behind what is there."""
    async with engine_of(NullStore(), resident_bytes=MIB) as engine:
        first, *rest = [asyncio.create_task(answer(engine, prompt)) for prompt in asked]
        await until(lambda: engine._scheduler.manager.match(engine_keys(engine, asked[0]))[1] >= 32)
        first.cancel()
        answers = await asyncio.gather(*rest)
        await settled(engine)
    assert [tokens for _, tokens in answers] == [greedy(prompt, 6) for prompt in asked[1:]]
    assert sum(sources.computed for sources, _ in answers) <= SHARED - 32 + sum(len(prompt) - SHARED for prompt in asked[1:])


def engine_keys(engine: Engine, prompt: tuple[int, ...]) -> list[BlockKey]:
    return chain_keys(engine._parts.root, prompt, BLOCK)


async def test_prefix_that_comes_by_layers_comes_once(
    engine_of: EngineMaker, model: Model, asked: list[tuple[int, ...]], greedy: Greedy
) -> None:
    """The others wait for the pass that it comes in."""
    store = LayeredMemoryStore(model.geometry)
    async with engine_of(store) as one:
        async for _ in one.prefill(PrefillRequest(request_id="p", prompt=asked[0][:SHARED])):
            pass
    async with engine_of(store, resident_bytes=MIB) as engine:
        answers = await asyncio.gather(*(answer(engine, prompt) for prompt in asked))
        await settled(engine)
    assert [tokens for _, tokens in answers] == [greedy(prompt, 6) for prompt in asked]
    assert sum(sources.pool for sources, _ in answers) == SHARED


@pytest.mark.parametrize("seed", range(4))
async def test_sharing_with_little_memory_and_random_hang_ups_stays_right(
    engine_of: EngineMaker, model: Model, prompts: Prompts, greedy: Greedy, seed: int
) -> None:
    """Those that wait hold blocks, those that compute are preempted for want of them, callers vanish, loads fail: nobody is stuck."""
    rng = random.Random(seed)
    store = MemoryStore(model.geometry.bytes_per_token)
    trunks = [prompts(96, seed=seed), prompts(64, seed=50 + seed)]
    asked = [(*rng.choice(trunks)[: rng.choice((32, 64, 96))], *prompts(rng.randrange(1, 30), seed=i)) for i in range(30)]
    async with engine_of(store, max_active=8, kv_bytes=400 * model.geometry.bytes_per_token, resident_bytes=MIB // 8) as engine:

        async def one(prompt: tuple[int, ...]) -> list[int]:
            store.fail_loads_from, store.fail_stores = rng.choice((None, None, 2)), rng.random() < 0.2
            return (await answer(engine, prompt, 20))[1]

        tasks = [asyncio.create_task(one(prompt)) for prompt in asked]
        for task in rng.sample(tasks, 10):
            await asyncio.sleep(rng.random() / 50)
            task.cancel()
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not engine._background)
        await settled(engine)
    assert all(got == greedy(prompt, 20) for prompt, got in zip(asked, answers, strict=True) if isinstance(got, list))
    assert {type(got) for got in answers} <= {list, asyncio.CancelledError}
    assert sum(isinstance(got, list) for got in answers) >= 20
