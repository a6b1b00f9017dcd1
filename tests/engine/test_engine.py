"""Requests through the whole engine, on a tiny model: the right tokens, from wherever the KV comes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from kvpool.block import chain_keys
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.schedule.scheduler import OverloadedError
from kvpool.engine.store import MemoryStore, NullStore
from kvpool.errors import ClosedError, ConfigError
from kvpool.request import (
    DecodeRequest,
    Finished,
    FinishReason,
    FirstToken,
    PrefillRequest,
    Published,
    Sampling,
    Started,
    TokenOut,
    TokenSources,
)
from kvpool.units import SECOND

BLOCK = 8
Prompts = Callable[..., tuple[int, ...]]
Greedy = Callable[[tuple[int, ...], int], list[int]]
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]
SAMPLED = Sampling(temperature=1.3, top_k=40, top_p=0.95, seed=7)


@pytest.fixture
def store(model: Model) -> MemoryStore:
    return MemoryStore(model.geometry.bytes_per_token)


async def prefill(engine: Engine, prompt: tuple[int, ...], sampling: Sampling = Sampling()) -> tuple[FirstToken, Published]:  # noqa: B008
    first, published = [event async for event in engine.prefill(PrefillRequest(request_id="p", prompt=prompt, sampling=sampling))]
    assert isinstance(first, FirstToken)
    assert isinstance(published, Published)
    return first, published


async def decode(
    engine: Engine, prompt: tuple[int, ...], generated: tuple[int, ...] = (), **fields: Any
) -> tuple[Started, list[int], Finished]:
    request = DecodeRequest(request_id="d", prompt=prompt, generated=generated, **{"max_tokens": 12, **fields})
    started, *tokens, finished = [event async for event in engine.decode(request)]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert all(isinstance(token, TokenOut) for token in tokens)
    return started, [token.token for token in tokens if isinstance(token, TokenOut)], finished


async def until(condition: Callable[[], bool]) -> None:
    """Wait for `condition`, for at most ten seconds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 32, 33, 64, 100])
async def test_engine_without_a_pool_equals_transformers(engine_of: EngineMaker, prompts: Prompts, greedy: Greedy, length: int) -> None:
    """The engine alone generates what `transformers` generates, at every position relative to blocks and chunks."""
    prompt = prompts(length, seed=length)
    async with engine_of(NullStore()) as engine:
        started, tokens, finished = await decode(engine, prompt)
    assert tokens == greedy(prompt, 12)
    assert started.sources == TokenSources(computed=length)
    assert finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [1, 7, 8, 9, 32, 64, 100])
async def test_engine_disaggregated_equals_transformers_and_decode_computes_nothing(
    engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, greedy: Greedy, length: int
) -> None:
    """Prefill in one engine, decode in another: the same tokens, and the decode side pulled all of the prompt's KV."""
    prompt = prompts(length, seed=length)
    async with engine_of(store) as one, engine_of(store) as two:
        first, published = await prefill(one, prompt)
        started, tokens, _ = await decode(two, prompt, (first.token,))
    assert [first.token, *tokens] == greedy(prompt, 12)
    assert first.sources == TokenSources(computed=length)
    assert published == Published(tokens=length, blocks_written=-(-length // BLOCK))
    assert started.sources == TokenSources(pool=length)


async def test_prefill_publishes_full_blocks_for_good_and_the_tail_for_a_minute(
    engine_of: EngineMaker, store: MemoryStore, model: Model, prompts: Prompts
) -> None:
    """A partial block is only good for the hand-off, so it must not take room for long."""
    prompt = prompts(29)
    async with engine_of(store) as engine:
        await prefill(engine, prompt)
    keys = chain_keys(model.namespace.root(), prompt, BLOCK, tail=True)
    assert store.ttls == {keys[0]: 0, keys[1]: 0, keys[2]: 0, keys[3]: 60 * SECOND}


async def test_prefill_pushes_what_it_computes_to_where_the_request_goes_on(
    engine_of: EngineMaker, store: MemoryStore, model: Model, prompts: Prompts
) -> None:
    """All of the prompt, tail included, and only of this request; a decode worker's own pushes concern nobody else."""
    prompt, other = prompts(29), prompts(29, seed=1)
    async with engine_of(store) as engine:
        _ = [event async for event in engine.prefill(PrefillRequest(request_id="p", prompt=prompt, hand_off=("there",)))]
        _ = [event async for event in engine.prefill(PrefillRequest(request_id="q", prompt=other))]
        await decode(engine, prompt, (5,))
    handed = [key for key, where in store.pushed if where == ("there",)]
    assert handed == chain_keys(model.namespace.root(), prompt, BLOCK, tail=True)
    assert {where for key, where in store.pushed if key not in handed} == {()}


async def test_prefill_pushes_finished_blocks_while_it_computes(engine_of: EngineMaker, store: MemoryStore, prompts: Prompts) -> None:
    """Blocks go out chunk by chunk (or several chunks together, if a push takes long), not at the end."""
    async with engine_of(store) as engine:
        await prefill(engine, prompts(128))
    firsts = [first for first, _, _ in store.stores]
    assert firsts[0] == 0
    assert len(firsts) >= 2
    assert sum(asked for _, asked, _ in store.stores) == 16


@pytest.mark.parametrize("blocks", range(13))
async def test_prefill_with_any_number_of_blocks_cached_gives_the_same_token(
    engine_of: EngineMaker, store: MemoryStore, model: Model, prompts: Prompts, greedy: Greedy, blocks: int
) -> None:
    """Every length of a cached prefix, all of the prompt included, loads what is there and computes the rest."""
    prompt = prompts(96)
    async with engine_of(store) as engine:
        await prefill(engine, prompt)
        keys = chain_keys(model.namespace.root(), prompt, BLOCK)
        for key in keys[blocks:]:
            del store.blocks[key]
        first, published = await prefill(engine, prompt)
    assert first.token == greedy(prompt, 1)[0]
    cached = min(blocks * BLOCK, 95)
    assert first.sources == TokenSources(pool=cached, computed=96 - cached)
    assert published == Published(tokens=96, blocks_written=12 - blocks)
    assert len(store.blocks) == 12


async def test_prefill_when_a_load_fails_midway_computes_the_rest(
    engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, greedy: Greedy
) -> None:
    """A pool that dies during a load costs time, never a token: what didn't arrive is computed."""
    prompt = prompts(100)
    async with engine_of(store) as engine:
        await prefill(engine, prompt)
        store.fail_loads_from = 5
        first, _ = await prefill(engine, prompt)
        started, tokens, _ = await decode(engine, prompt, (first.token,))
    assert first.sources == TokenSources(pool=40, computed=60)
    assert started.sources == TokenSources(pool=40, computed=60)
    assert [first.token, *tokens] == greedy(prompt, 12)


async def test_engine_with_a_pool_that_takes_nothing_still_serves(
    engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, greedy: Greedy
) -> None:
    """A full or broken pool is told truthfully: nothing is published, everything is computed."""
    prompt, store.fail_stores = prompts(50), True
    async with engine_of(store) as engine:
        first, published = await prefill(engine, prompt)
        started, tokens, _ = await decode(engine, prompt, (first.token,))
    assert published == Published(tokens=0, blocks_written=0)
    assert started.sources == TokenSources(computed=50)
    assert [first.token, *tokens] == greedy(prompt, 12)


async def test_decode_pushes_what_it_completes_so_the_next_turn_finds_it(
    engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, greedy: Greedy
) -> None:
    """The answer's blocks are in the pool when the answer ends: the next turn computes only what it adds."""
    prompt = prompts(30)
    async with engine_of(store) as engine:
        _, answer, _ = await decode(engine, prompt, max_tokens=20)
        turn = (*prompt, *answer, *prompts(5, seed=9))
        first, _ = await prefill(engine, turn)
    assert answer == greedy(prompt, 20)
    assert first.sources == TokenSources(pool=48, computed=7)  # 49 tokens had KV: six full blocks
    assert first.token == greedy(turn, 1)[0]


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("lost", [0, 1, 5, 11])
async def test_decode_retried_elsewhere_continues_with_the_same_tokens(
    engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, sampling: Sampling, lost: int
) -> None:
    """A worker's death loses no token: another one continues from those generated so far, sampled or not."""
    prompt = prompts(45)
    async with engine_of(NullStore()) as one, engine_of(store) as two:
        _, tokens, _ = await decode(one, prompt, sampling=sampling)
        _, rest, finished = await decode(two, prompt, tuple(tokens[:lost]), sampling=sampling)
    assert tokens[:lost] + rest == tokens
    assert finished.reason is FinishReason.LENGTH


async def test_prefill_and_decode_draw_the_same_first_token(engine_of: EngineMaker, prompts: Prompts) -> None:
    """Draws depend on seed and position only, so it doesn't matter which worker makes the first."""
    prompt = prompts(20)
    async with engine_of(NullStore()) as engine:
        for seed in range(5):
            sampling = Sampling(temperature=1.5, seed=seed)
            first, _ = await prefill(engine, prompt, sampling)
            _, tokens, _ = await decode(engine, prompt, sampling=sampling, max_tokens=1)
            assert tokens == [first.token]


async def test_decode_ends_after_a_stop_token_and_emits_it(engine_of: EngineMaker, prompts: Prompts, greedy: Greedy) -> None:
    """The stop token is the last event's token; the router decides what of it becomes text."""
    prompt = prompts(40)
    expected = greedy(prompt, 12)
    stop = expected[4]
    cut = expected.index(stop) + 1
    async with engine_of(NullStore()) as engine:
        _, tokens, finished = await decode(engine, prompt, stop_tokens=(stop, 255))
        events = [
            e
            async for e in engine.decode(
                DecodeRequest(request_id="x", prompt=prompt, generated=tuple(tokens), max_tokens=12, stop_tokens=(stop,))
            )
        ]
    assert tokens == expected[:cut]
    assert finished.reason is FinishReason.STOP
    assert events == [Finished(reason=FinishReason.STOP)]


async def test_decode_counts_generated_tokens_in_max_tokens(engine_of: EngineMaker, prompts: Prompts, greedy: Greedy) -> None:
    """`max_tokens` bounds all generated tokens, those of an earlier attempt included."""
    prompt = prompts(16)
    expected = greedy(prompt, 5)
    async with engine_of(NullStore()) as engine:
        _, tokens, _ = await decode(engine, prompt, tuple(expected[:3]), max_tokens=5)
        over = [e async for e in engine.decode(DecodeRequest(request_id="x", prompt=prompt, generated=tuple(expected), max_tokens=5))]
    assert tokens == expected[3:]
    assert over == [Finished(reason=FinishReason.LENGTH)]


async def test_decode_ends_at_the_end_of_the_context(engine_of: EngineMaker, prompts: Prompts) -> None:
    """Prompt and answer share the context; a retry at its end has nothing to add."""
    prompt = prompts(500)
    async with engine_of(NullStore()) as engine:
        _, tokens, finished = await decode(engine, prompt, max_tokens=100)
        assert (len(tokens), finished.reason) == (12, FinishReason.LENGTH)
        retry = DecodeRequest(request_id="x", prompt=prompt, generated=tuple(tokens), max_tokens=100)
        assert [e async for e in engine.decode(retry)] == [Finished(reason=FinishReason.LENGTH)]


async def test_engine_refuses_what_the_model_cannot_serve(engine_of: EngineMaker, prompts: Prompts) -> None:
    """Wrong input is the caller's error and says what is wrong; the engine goes on."""
    async with engine_of(NullStore()) as engine:
        for prompt, complaint in (((), "empty"), (prompts(512), "context is 512"), ((1, 256), "between 0 and 255")):
            with pytest.raises(ConfigError, match=complaint):
                await prefill(engine, prompt)
            with pytest.raises(ConfigError, match=complaint):
                await decode(engine, prompt)
        for fields, complaint in (
            ({"max_tokens": 0}, "max_tokens"),
            ({"generated": (256,)}, "between"),
            ({"generated": (1,) * 511}, "together"),
        ):
            with pytest.raises(ConfigError, match=complaint):
                await decode(engine, (1, 2), **fields)
        await decode(engine, (1, 2))
        await until(lambda: engine.status(role="decode", model="tiny").active_requests == 0)
        status = engine.status(role="decode", model="tiny")
    assert (status.active_requests, status.finished_requests, status.failed_requests) == (0, 1, 0)


async def test_engine_serves_32_at_once_each_right(engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, greedy: Greedy) -> None:
    """Sequences that take turns on one thread don't mix: each gets its own tokens, whatever shares its prefix."""
    shared = prompts(40, seed=99)
    asked = [(*shared[: 8 * (i % 6)], *prompts(5 + i, seed=i)) for i in range(32)]

    async def serve(prompt: tuple[int, ...]) -> list[int]:
        first, _ = await prefill(one, prompt)
        _, tokens, _ = await decode(two, prompt, (first.token,))
        return [first.token, *tokens]

    async with engine_of(store, max_active=8) as one, engine_of(store, resident_bytes=1 << 20) as two:
        answers = await asyncio.gather(*map(serve, asked))
        await until(lambda: not one.status(role="", model="").active_requests + two.status(role="", model="").active_requests)
    assert answers == [greedy(prompt, 12) for prompt in asked]


async def test_engine_beyond_its_queue_refuses_at_once(engine_of: EngineMaker, prompts: Prompts) -> None:
    """Bounded: so many active, so many waiting, the next is told to go elsewhere; those waiting are served."""
    async with engine_of(NullStore(), max_active=1, max_queued=2) as engine:
        stream = engine.decode(DecodeRequest(request_id="x", prompt=(1, 2), max_tokens=400))  # more than may wait for its reader
        assert isinstance(await anext(stream), Started)
        waiting = [asyncio.create_task(decode(engine, (3, i), max_tokens=2)) for i in range(2)]
        await until(lambda: engine.status(role="", model="").queued_requests == 2)
        with pytest.raises(OverloadedError, match="1 requests are active and 2 wait"):
            await decode(engine, (9,))
        await _close(stream)
        assert [len(tokens) for _, tokens, _ in await asyncio.gather(*waiting)] == [2, 2]


async def _close(stream: AsyncIterator[Any]) -> None:
    """Hang up."""
    closing: Any = stream
    await closing.aclose()


async def test_decode_cancelled_frees_its_place_and_its_blocks(
    engine_of: EngineMaker, prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that hangs up stops the work within a pass: no place, no queue entry, no block stays behind."""
    passes: list[int] = []
    run = Model.run

    def noted(self: Model, store: Any, segments: Any, **how: Any) -> Any:
        passes.append(len(segments))
        return run(self, store, segments, **how)

    monkeypatch.setattr(Model, "run", noted)
    async with engine_of(NullStore()) as engine:
        tasks = [asyncio.create_task(decode(engine, prompts(60, seed=i), max_tokens=400)) for i in range(4)]
        await until(lambda: 4 in passes)
        for task in tasks:
            task.cancel()
        assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*tasks, return_exceptions=True))
        seen = len(passes)
        await until(lambda: engine.status(role="", model="").active_requests == 0)
        await until(lambda: engine._scheduler.manager.held == 0)
        engine._scheduler.manager.audit([])
        assert len(passes) <= seen + 1
        _, tokens, _ = await decode(engine, (5, 6))
        assert len(tokens) == 12


async def test_decode_cancelled_leaves_its_finished_blocks_to_others(engine_of: EngineMaker, store: MemoryStore, prompts: Prompts) -> None:
    """What was computed before the hang-up is not lost: its full blocks are in the pool."""
    prompt = prompts(64)
    async with engine_of(store) as engine:
        stream = engine.decode(DecodeRequest(request_id="x", prompt=prompt, max_tokens=300))
        for _ in range(10):
            await anext(stream)
        await _close(stream)
        await until(lambda: engine.status(role="", model="").active_requests == 0)
    assert len(store.blocks) >= 9


async def test_engine_closed_refuses_and_fails_what_waits(engine_of: EngineMaker, prompts: Prompts) -> None:
    """After close nothing hangs: streams in flight and new requests end in a clear error."""
    async with engine_of(NullStore()) as engine:
        stream = engine.decode(DecodeRequest(request_id="x", prompt=(1, 2), max_tokens=300))
        await anext(stream)
    with pytest.raises(ClosedError):
        async for _ in stream:
            pass
    with pytest.raises(ClosedError):
        await decode(engine, (1,))


async def test_warm_up_measures_the_speed_and_leaves_nothing(engine_of: EngineMaker, store: MemoryStore) -> None:
    """The first real load needs a deadline, so the speed must be known; the pool must not get made-up blocks."""
    async with engine_of(store, resident_bytes=1 << 20) as engine:
        await engine.warm_up()
        status = engine.status(role="prefill", model="tiny")
    assert status.prefill_tokens_per_s > 0
    assert status.resident_tokens == 0
    assert store.stores == []
    assert status.reaches == {"0" * 32: "memory"}
