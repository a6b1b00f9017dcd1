"""The losslessness oracle: scores on top of a loaded prefix equal those of a fresh run of the same chunks, bit for bit."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpool.engine.sampling
from kvpool.block import chain_keys
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model, load_model
from kvpool.engine.prefill import chunk_plan
from kvpool.engine.sampling import Scores, choose
from kvpool.engine.store import MemoryStore
from kvpool.request import DecodeRequest, FirstToken, PrefillRequest, Sampling, TokenOut, TokenSources

BLOCK, CHUNK = 8, 32
Prompts = Callable[..., tuple[int, ...]]
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """The scores each position was chosen from, as the engine runs."""
    scores_at: dict[int, torch.Tensor] = {}

    def remember(scores: Scores, sampling: Sampling, position: int) -> int:
        scores_at[position] = torch.from_numpy(scores.copy())
        return choose(scores, sampling, position)

    monkeypatch.setattr(kvpool.engine.sampling, "choose", remember)
    return scores_at


def fresh_scores(model: Model, prompt: tuple[int, ...], passes: list[tuple[int, int]]) -> torch.Tensor:
    """The scores after `prompt`, computed from nothing in `passes`."""
    cache = model.new_cache(capacity=len(prompt), limit=len(prompt))
    for start, end in passes[:-1]:
        model.extend(cache, prompt[start:end])
    return model.predict(cache, prompt[slice(*passes[-1])])


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def typed(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "cache"))
    return load_model(tiny, dtype=request.param, block_tokens=BLOCK)


@pytest.mark.parametrize("length", [33, 64, 77, 96])
async def test_scores_on_a_loaded_prefix_are_bit_equal_to_a_fresh_run(
    engine_of: EngineMaker, typed: Model, prompts: Prompts, seen: dict[int, torch.Tensor], length: int
) -> None:
    """Prefill, hand-off and every decode step, in every dtype: moving KV through the pool changes no bit."""
    prompt, store = prompts(length), MemoryStore(typed.geometry.bytes_per_token)
    async with engine_of(store, model=typed) as one, engine_of(store, model=typed) as two:
        first = await _first(one, prompt)
        request = DecodeRequest(request_id="d", prompt=prompt, generated=(first.token,), max_tokens=10)
        moved = [event.token async for event in two.decode(request) if isinstance(event, TokenOut)]
    through_pool = dict(seen)
    assert torch.equal(through_pool[length], fresh_scores(typed, prompt, chunk_plan(0, length, CHUNK)))
    cache = typed.new_cache(capacity=length + 10, limit=length + 10)
    for start, end in chunk_plan(0, length, CHUNK):
        typed.extend(cache, prompt[start:end])
    for step, token in enumerate([first.token, *moved[:-1]]):
        assert torch.equal(through_pool[length + 1 + step], typed.predict(cache, [token]))


@pytest.mark.parametrize("blocks", range(13))
async def test_scores_after_a_partial_load_are_those_of_the_same_chunks(
    engine_of: EngineMaker, model: Model, prompts: Prompts, seen: dict[int, torch.Tensor], blocks: int
) -> None:
    """Any number of cached blocks: bit-equal to a run with the same passes; within rounding of, and choosing like, the uncut run."""
    prompt, store = prompts(100), MemoryStore(model.geometry.bytes_per_token)
    async with engine_of(store) as engine:
        await _first(engine, prompt)
        uncut = seen[100]
        for key in chain_keys(model.namespace.root(), prompt, BLOCK)[blocks:]:
            del store.blocks[key]
        first = await _first(engine, prompt)
    assert first.sources == TokenSources(pool=blocks * BLOCK, computed=100 - blocks * BLOCK)
    # The cached blocks came from the uncut run's passes, which end on chunk boundaries.
    aligned = blocks * BLOCK // CHUNK * CHUNK
    cache = model.new_cache(capacity=100, limit=100)
    for start, end in chunk_plan(0, aligned, CHUNK) + ([(aligned, aligned + CHUNK)] if aligned < blocks * BLOCK else []):
        model.extend(cache, prompt[start : min(end, 100)])
    cache.truncate(blocks * BLOCK)
    for start, end in chunk_plan(blocks * BLOCK, 100, CHUNK)[:-1]:
        model.extend(cache, prompt[start:end])
    last = chunk_plan(blocks * BLOCK, 100, CHUNK)[-1]
    assert torch.equal(seen[100], model.predict(cache, prompt[slice(*last)]))
    assert torch.allclose(seen[100], uncut, rtol=1e-4, atol=1e-4)
    assert seen[100].argmax() == uncut.argmax()


@pytest.mark.parametrize("steady", [True, False])
async def test_scores_do_not_depend_on_who_else_is_served(
    engine_of: EngineMaker, model: Model, prompts: Prompts, seen: dict[int, torch.Tensor], steady: bool
) -> None:
    """Sequences share passes: with `steady` company changes no bit, without it nothing above rounding, and no greedy token."""
    prompt = prompts(70)

    async def served(company: int) -> list[torch.Tensor]:
        async with engine_of(MemoryStore(model.geometry.bytes_per_token), steady=steady) as engine:
            others = [engine.decode(DecodeRequest(request_id="c", prompt=prompts(9, seed=10 + i), max_tokens=400)) for i in range(company)]
            for stream in others:
                await anext(stream)
            await _drain(engine.decode(DecodeRequest(request_id="d", prompt=prompt, max_tokens=8)))
            for stream in others:
                await stream.aclose()  # type: ignore[attr-defined]
        return [seen[position] for position in range(70, 78)]

    alone = await served(0)
    for company in (1, 2, 5):
        for one, other in zip(await served(company), alone, strict=True):
            assert torch.equal(one, other) if steady else torch.allclose(one, other, rtol=1e-4, atol=1e-4)
            assert one.argmax() == other.argmax()


async def _first(engine: Engine, prompt: tuple[int, ...]) -> FirstToken:
    """Prefill `prompt` and wait until it is published."""
    first, _ = [event async for event in engine.prefill(PrefillRequest(request_id="p", prompt=prompt))]
    assert isinstance(first, FirstToken)
    return first


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass
