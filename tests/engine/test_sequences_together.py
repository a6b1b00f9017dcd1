"""Requests that meet each other: the worker's own memory, turns on the compute thread, loads that are slow or abandoned."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from time import monotonic_ns
from typing import Any

import pytest

import kvpool.engine.patience
import kvpool.engine.prefill
from kvpool.block import BlockKey
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.prefill import LOAD_FLOOR_NS
from kvpool.engine.store import MemoryStore, NullStore, Sink
from kvpool.request import DecodeRequest, FirstToken, PrefillRequest, Published, Started, TokenOut, TokenSources
from kvpool.units import MIB, MS, SECOND

BLOCK, CHUNK = 8, 32
Prompts = Callable[..., tuple[int, ...]]
Greedy = Callable[[tuple[int, ...], int], list[int]]
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]


class HeldStore(MemoryStore):
    """Loads wait until `go` is set, then deliver even to a caller that gave up, as a thread in the middle of a copy would."""

    def __init__(self, bytes_per_token: int) -> None:
        super().__init__(bytes_per_token)
        self.go = threading.Event()
        self.go.set()
        self.asked = asyncio.Event()
        self.deadlines: list[int] = []

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Sink, *, deadline_ns: int) -> int:
        self.deadlines.append(deadline_ns - monotonic_ns())
        self.asked.set()

        def deliver() -> int:
            assert self.go.wait(10)
            return self._load(list(chain), first, list(counts), sink)

        return await asyncio.to_thread(deliver)


@pytest.fixture
def store(model: Model) -> HeldStore:
    return HeldStore(model.geometry.bytes_per_token)


async def first_of(engine: Engine, prompt: tuple[int, ...]) -> FirstToken:
    first, published = [event async for event in engine.prefill(PrefillRequest(request_id="p", prompt=prompt))]
    assert isinstance(first, FirstToken)
    assert published == Published(tokens=len(prompt), blocks_written=published.blocks_written)  # type: ignore[union-attr]
    return first


async def answer_of(engine: Engine, prompt: tuple[int, ...], count: int = 12) -> tuple[Started, list[int]]:
    started, *events = [event async for event in engine.decode(DecodeRequest(request_id="d", prompt=prompt, max_tokens=count))]
    assert isinstance(started, Started)
    return started, [event.token for event in events if isinstance(event, TokenOut)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, for at most ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def active(engine: Engine) -> int:
    return engine.status(role="", model="").active_requests


async def test_next_turn_on_the_same_worker_takes_its_own_kv(engine_of: EngineMaker, prompts: Prompts, greedy: Greedy) -> None:
    """A conversation that stays on its worker computes only what is new, without a pool."""
    prompt = prompts(45)
    async with engine_of(NullStore(), resident_bytes=MIB) as engine:
        _, answer = await answer_of(engine, prompt)
        await until(lambda: active(engine) == 0)
        turn = (*prompt, *answer, *prompts(9, seed=5))
        started, second = await answer_of(engine, turn)
        await until(lambda: active(engine) == 0)
        resident = engine.status(role="", model="").resident_tokens
    assert started.sources == TokenSources(resident=(45 + 11) // BLOCK * BLOCK, computed=1 + 9)
    assert (answer, second) == (greedy(prompt, 12), greedy(turn, 12))
    assert resident == (len(turn) + 11) // BLOCK * BLOCK


async def test_resident_prefix_is_completed_from_the_pool(
    engine_of: EngineMaker, store: HeldStore, prompts: Prompts, greedy: Greedy
) -> None:
    """This worker's part of the prefix, then the pool's, then computing: each token counted once, where it came from."""
    prompt = prompts(90)
    async with engine_of(store) as other:
        await first_of(other, prompt)
    async with engine_of(store, resident_bytes=MIB) as engine:
        await first_of(engine, prompt[:36])
        await until(lambda: active(engine) == 0)
        first = await first_of(engine, prompt)
    assert first.sources == TokenSources(resident=32, pool=56, computed=2)
    assert first.token == greedy(prompt, 1)[0]


async def test_resident_blocks_the_pool_lost_are_pushed_again(engine_of: EngineMaker, store: HeldStore, prompts: Prompts) -> None:
    """The hand-off needs the whole prompt in the pool, also what this worker had and the pool has evicted."""
    prompt = prompts(64)
    async with engine_of(store, resident_bytes=MIB) as engine:
        await first_of(engine, prompt)
        await until(lambda: active(engine) == 0)
        store.blocks.clear()
        first = await first_of(engine, prompt)
    assert first.sources == TokenSources(resident=63, computed=1)
    assert len(store.blocks) == 8


async def test_resident_memory_serves_several_requests_at_once(engine_of: EngineMaker, prompts: Prompts, greedy: Greedy) -> None:
    """Two requests with one prefix at once share its blocks, and what each adds is its own."""
    shared = prompts(40)
    async with engine_of(NullStore(), resident_bytes=MIB) as engine:
        await answer_of(engine, shared)
        await until(lambda: active(engine) == 0)
        turns = [(*shared, *prompts(7, seed=s)) for s in (1, 2)]
        answers = await asyncio.gather(*(answer_of(engine, turn) for turn in turns))
    assert sorted(started.sources.resident for started, _ in answers) == [40, 40]
    assert [tokens for _, tokens in answers] == [greedy(turn, 12) for turn in turns]


async def test_long_prefill_and_decodes_share_passes(engine_of: EngineMaker, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long prompt is computed, every running decode gets a token with each of its chunks."""
    passes: list[list[int]] = []
    run = Model.run

    def noted(self: Model, store: Any, segments: Sequence[Any], **how: Any) -> Any:
        passes.append([len(segment.tokens) for segment in segments])
        return run(self, store, segments, **how)

    monkeypatch.setattr(Model, "run", noted)
    async with engine_of(NullStore()) as engine:
        streams = [engine.decode(DecodeRequest(request_id="d", prompt=(i, 2), max_tokens=500)) for i in range(2)]
        for stream in streams:
            await anext(stream)
        readers = [asyncio.create_task(_read(stream)) for stream in streams]
        await first_of_alone(engine, prompts(320))
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    chunks = [sizes for sizes in passes if CHUNK in sizes]
    assert chunks == [[1, 1, CHUNK]] * 10


async def first_of_alone(engine: Engine, prompt: tuple[int, ...]) -> None:
    """A prefill whose blocks nobody keeps."""
    async for _ in engine.prefill(PrefillRequest(request_id="p", prompt=prompt)):
        pass


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


async def test_load_gets_the_time_a_recomputation_would_take(
    engine_of: EngineMaker, store: HeldStore, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never slower than recompute: the deadline follows the measured speed, has a floor, and the request's own deadline caps it."""
    prompt = prompts(160)
    for module in (kvpool.engine.prefill, kvpool.engine.patience):
        monkeypatch.setattr(module, "LOAD_FLOOR_NS", LOAD_FLOOR_NS)
    async with engine_of(store) as engine:
        await first_of(engine, prompt)
        assert store.deadlines.pop() <= LOAD_FLOOR_NS
        engine._rate._tokens, engine._rate._ns = 100, SECOND
        await first_of(engine, prompt)
        assert SECOND < store.deadlines.pop() <= 1.6 * SECOND
        request, soon = PrefillRequest(request_id="p", prompt=prompt), monotonic_ns() + 100 * MS
        async for _ in engine.prefill(request, deadline_ns=soon):
            pass
        assert store.deadlines.pop() <= 100 * MS


async def test_request_cancelled_during_a_load_goes_at_once(
    engine_of: EngineMaker, store: HeldStore, prompts: Prompts, greedy: Greedy
) -> None:
    """A slow pool doesn't hold a cancelled request, and what it still delivers then harms nobody."""
    prompt = prompts(64)
    async with engine_of(store, resident_bytes=MIB) as engine:
        await first_of(engine, prompt[:32])
        await until(lambda: active(engine) == 0)
        store.asked.clear()
        store.go.clear()
        task = asyncio.create_task(answer_of(engine, prompt))
        await store.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: active(engine) == 0)
        store.go.set()
        _, tokens = await answer_of(engine, prompt)
    assert tokens == greedy(prompt, 12)


@pytest.mark.parametrize("seed", range(3))
async def test_engine_under_random_hang_ups_and_failures_stays_right_and_balanced(
    engine_of: EngineMaker, model: Model, prompts: Prompts, greedy: Greedy, seed: int
) -> None:
    """Clients that hang up anywhere, a pool that comes and goes, little memory: who stays is served right, nothing leaks."""
    rng = random.Random(seed)
    store = MemoryStore(model.geometry.bytes_per_token)
    shared = prompts(64, seed=1000 + seed)
    asked = [(*shared[: rng.randrange(64)], *prompts(rng.randrange(1, 40), seed=100 * seed + i)) for i in range(40)]
    patience = [rng.randrange(3, 14) if rng.random() < 0.5 else 99 for _ in asked]

    async def serve(prompt: tuple[int, ...], events_wanted: int) -> list[int] | None:
        stream: Any = engine.decode(DecodeRequest(request_id="d", prompt=prompt, max_tokens=10))
        tokens = []
        try:
            async for event in stream:
                events_wanted -= 1
                store.fail_stores, store.fail_loads_from = rng.random() < 0.2, rng.choice([None, None, 0, 3])
                if isinstance(event, TokenOut):
                    tokens.append(event.token)
                if events_wanted == 0:
                    return None
        finally:
            await stream.aclose()
        return tokens

    async with engine_of(store, max_active=6, kv_bytes=600 * model.geometry.bytes_per_token, resident_bytes=MIB // 4) as engine:
        tasks = [asyncio.create_task(serve(prompt, wanted)) for prompt, wanted in zip(asked, patience, strict=True)]
        for task in rng.sample(tasks, 8):
            await asyncio.sleep(rng.random() / 100)
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: active(engine) == 0 and not engine._background)
        manager = engine._scheduler.manager
        assert (manager.held, len(engine._scheduler.waiting)) == (0, 0)
        manager.audit([])
    whole = [(prompt, answer) for prompt, answer in zip(asked, answers, strict=True) if isinstance(answer, list)]
    assert len(whole) >= 8
    assert all(answer == greedy(prompt, 10) for prompt, answer in whole)
    assert {type(answer) for answer in answers} <= {list, type(None), asyncio.CancelledError}
