"""Attention techniques chosen per request or per engine: the tokens of the reference run, and nothing tainted for anybody else."""

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from kvpool.block import BlockKey, chain_keys
from kvpool.engine.attention import build
from kvpool.engine.attention.network import new_session, read_prompt, score, use_sessions
from kvpool.engine.attention.settings import StreamingSettings, parse_attention
from kvpool.engine.attention.streaming import Streaming
from kvpool.engine.attention.technique import Seen
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model
from kvpool.engine.paged.blocks import BlockManager
from kvpool.engine.store import MemoryStore, NullStore
from kvpool.errors import ConfigError, LocalError
from kvpool.request import DecodeRequest, FirstToken, Logprobs, PrefillRequest, Sampling, Started, TokenOut, TokenSources
from kvpool.testing.layered_store import LayeredMemoryStore

BLOCK, CHUNK, COUNT = 8, 32, 12
SMALL = ["streaming:budget=0.25", "h2o:budget=0.25", "snapkv:budget=0.25,window=8", "quest:budget=12,page=4,dense=0"]
LATE = ["streaming:budget=80", "h2o:budget=78", "quest:budget=76,page=4,dense=0"]
"""Budgets that leave nothing out at first, for prompts of about 70 tokens."""
Prompts = Callable[..., tuple[int, ...]]
Greedy = Callable[[tuple[int, ...], int], list[int]]
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]
Expected = Callable[..., list[int]]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> Expected:
    """`expected(prompt, text, count)`: a `transformers` model under a session, with nothing of the engine; greedy, remembered."""
    network: Any = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    use_sessions(network)
    known: dict[tuple[Any, ...], list[int]] = {}

    def run(prompt: tuple[int, ...], text: str, count: int = COUNT) -> list[int]:
        if (prompt, text, count) not in known:
            asked = parse_attention(text)
            assert asked is not None
            session, cache = new_session(network, asked), DynamicCache()
            cuts = [*range(0, len(prompt), CHUNK), len(prompt)]
            for start, end in pairwise(cuts[:-1]):
                read_prompt(network, cache, prompt[start:end], session)
            tokens = [int(score(network, cache, prompt[cuts[-2] :], session)[-1].argmax())]
            session.settle(len(prompt))
            while len(tokens) < count:
                tokens.append(int(score(network, cache, tokens[-1:], session)[-1].argmax()))
            known[prompt, text, count] = tokens
        return known[prompt, text, count]

    return run


@pytest.fixture
def store(model: Model) -> MemoryStore:
    return MemoryStore(model.geometry.bytes_per_token)


async def events_of(engine: Engine, prompt: tuple[int, ...], text: str, **fields: Any) -> tuple[Started, list[TokenOut]]:
    request = DecodeRequest(request_id="d", prompt=prompt, attention=text, **{"max_tokens": COUNT, **fields})
    started, *events = [event async for event in engine.decode(request)]
    assert isinstance(started, Started)
    return started, [event for event in events if isinstance(event, TokenOut)]


async def answer(engine: Engine, prompt: tuple[int, ...], text: str, **fields: Any) -> list[int]:
    return [event.token for event in (await events_of(engine, prompt, text, **fields))[1]]


async def prefill(engine: Engine, prompt: tuple[int, ...]) -> int:
    first, _ = [event async for event in engine.prefill(PrefillRequest(request_id="p", prompt=prompt))]
    assert isinstance(first, FirstToken)
    return first.token


async def idle(engine: Engine) -> None:
    """Everything has been given back."""
    async with asyncio.timeout(10):
        while engine._scheduler.manager.held or engine._scheduler.active:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    engine._scheduler.manager.audit([])


@pytest.mark.parametrize("text", [*SMALL, *LATE])
async def test_a_technique_through_the_engine_gives_the_tokens_of_the_reference(
    engine_of: EngineMaker, prompts: Prompts, greedy: Greedy, expected: Expected, text: str
) -> None:
    """Paged, in chunks, scheduled: what is read is what the technique alone would read. Small budgets do change answers."""
    asked = [prompts(length, seed=length) for length in (33, 64, 70)]
    async with engine_of(NullStore()) as engine:
        answers = [await answer(engine, prompt, text) for prompt in asked]
    assert answers == [expected(prompt, text) for prompt in asked]
    if text in SMALL:
        assert answers != [greedy(prompt, COUNT) for prompt in asked]


async def test_the_engines_own_technique_is_for_those_that_do_not_choose(
    engine_of: EngineMaker, prompts: Prompts, greedy: Greedy, expected: Expected
) -> None:
    """Per server by its settings, per request by a text; "full" is a choice too. First tokens of a prefill are those of full attention."""
    prompt = prompts(70)
    async with engine_of(NullStore(), attention=parse_attention(SMALL[0])) as engine:
        assert await answer(engine, prompt, "") == expected(prompt, SMALL[0])
        assert await answer(engine, prompt, SMALL[1]) == expected(prompt, SMALL[1])
        assert await answer(engine, prompt, "full") == greedy(prompt, COUNT)
        assert await prefill(engine, prompt) == greedy(prompt, 1)[0]


@pytest.mark.parametrize("layout", ["paged", "vattention"])
async def test_sequences_with_and_without_techniques_share_passes(
    engine_of: EngineMaker, model: Model, prompts: Prompts, expected: Expected, layout: str
) -> None:
    """Each gets its own tokens, and the plain ones their very bits, as if nobody else were there."""
    if layout == "vattention":
        model = Model(model._network, replace(model.namespace, geometry=replace(model.geometry, block_tokens=64)))
    shared, likely = prompts(70), Sampling(logprobs=5)
    plain = [(*shared[: 10 * i], *prompts(9, seed=i)) for i in range(4)]
    async with engine_of(NullStore(), layout=layout, model=model, steady=True) as engine:
        alone = [await events_of(engine, prompt, "full", sampling=likely) for prompt in plain]
        tasks = [events_of(engine, prompt, "full", sampling=likely) for prompt in plain]
        others = [answer(engine, shared, text) for text in [*SMALL, *LATE]]
        together, answers = await asyncio.gather(asyncio.gather(*tasks), asyncio.gather(*others))
        await idle(engine)
    assert [events for _, events in together] == [events for _, events in alone]
    assert answers == [expected(shared, text) for text in [*SMALL, *LATE]]


@pytest.mark.parametrize("name", ["streaming", "h2o", "snapkv", "quest"])
async def test_a_budget_for_everything_is_full_attention_to_the_bit_and_publishes_as_it_does(
    engine_of: EngineMaker, model: Model, prompts: Prompts, name: str
) -> None:
    """Nothing was left out, so nothing is tainted: the same scores, the same blocks in the pool."""
    prompt, stores, likely = prompts(61), [], []
    for text in ("full", f"{name}:budget=500"):
        stores.append(MemoryStore(model.geometry.bytes_per_token))
        async with engine_of(stores[-1]) as engine:
            _, events = await events_of(engine, prompt, text, max_tokens=30, sampling=Sampling(logprobs=20))
            likely.append([(event.token, event.logprobs) for event in events])
            await idle(engine)
    assert isinstance(likely[0][0][1], Logprobs)
    assert likely[0] == likely[1]
    assert list(stores[0].blocks) == list(stores[1].blocks)
    assert len(stores[0].blocks) == (61 + 29) // BLOCK
    assert all(np.array_equal(block, stores[1].blocks[key]) for key, block in stores[0].blocks.items())


@pytest.mark.parametrize("text", SMALL)
async def test_prompt_comes_from_the_pool_as_far_as_the_technique_need_not_see_it(
    engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, expected: Expected, text: str
) -> None:
    """Prefilled elsewhere: what asks for the prompt's queries computes that part, and the tokens are the same wherever KV came from."""
    prompt = prompts(69)
    wanted = {"streaming": 68, "h2o": 0, "snapkv": 61, "quest": 68}[text.partition(":")[0]]
    async with engine_of(store) as one, engine_of(store, resident_bytes=1 << 20) as two:
        first = await prefill(one, prompt)
        pooled, events = await events_of(two, prompt, text, generated=(first,))
        await idle(two)
        resident, again = await events_of(two, prompt, text)
    assert pooled.sources == TokenSources(pool=wanted, computed=69 - wanted)
    here = min(wanted, 64)  # its full blocks were named there; the partial one comes from the pool again
    assert resident.sources == TokenSources(resident=here, pool=wanted - here, computed=69 - wanted)
    assert [first, *(event.token for event in events)] == [event.token for event in again] == expected(prompt, text)


@pytest.mark.parametrize("text", [*SMALL, LATE[1]])
async def test_an_answer_is_taken_up_by_another_worker_with_the_same_tokens(
    engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, expected: Expected, text: str
) -> None:
    """The first worker died after k tokens; the state it had is made again, a token per pass."""
    prompt = prompts(70, seed=4)
    tokens = expected(prompt, text, 20)
    async with engine_of(store) as engine:
        for known in (1, 2, 9, 19):
            started, events = await events_of(engine, prompt, text, generated=tuple(tokens[:known]), max_tokens=20)
            assert [event.token for event in events] == tokens[known:]
            assert started.sources.cached + started.sources.computed == len(prompt) + known - 1
            assert started.sources.cached < len(prompt)


@pytest.mark.parametrize("name", ["streaming:budget=0.3", "h2o:budget=0.3", "snapkv:budget=0.3,window=8", "quest:budget=16,page=4,dense=0"])
async def test_preempted_sequences_begin_anew_and_finish_right(
    engine_of: EngineMaker, store: MemoryStore, prompts: Prompts, expected: Expected, name: str
) -> None:
    """Their KV is gone and their session with it: both are made again, beside sequences that lose nothing but time."""
    asked = [prompts(50 + i, seed=i) for i in range(6)]
    async with engine_of(store, kv_bytes=300 * 512, resident_bytes=1 << 15) as engine:
        answers = await asyncio.gather(*(answer(engine, prompt, name, max_tokens=40) for prompt in asked))
        assert engine.preemptions > 0
        await idle(engine)
    assert answers == [expected(prompt, name, 40) for prompt in asked]


class Counting(Streaming):
    """Insists on being shown each pass in all layers."""

    def __init__(self, asked: StreamingSettings) -> None:
        super().__init__(asked)
        self._passes: Counter[int] = Counter()

    def update(self, layer: int, seen: Seen) -> None:
        self._passes[layer] += 1
        if self._passes[layer] != self._passes[0]:
            raise LocalError(f"layer 0 has seen {self._passes[0]} passes, layer {layer} {self._passes[layer]}")


async def test_layers_that_do_not_come_leave_no_trace_in_a_technique(
    engine_of: EngineMaker, model: Model, prompts: Prompts, greedy: Greedy, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dropped pass had shown it layer 0 already; the prompt is shown to a new one. Layers that come are read behind the gate."""
    make = build.make_technique
    monkeypatch.setattr(build, "make_technique", lambda asked: Counting(asked) if isinstance(asked, StreamingSettings) else make(asked))
    layered, prompt = LayeredMemoryStore(model.geometry), prompts(77)
    async with engine_of(layered) as one:
        await prefill(one, prompt)
    for layer in (1, None):
        layered.fail_layers_from = layer
        for text in ("full", *SMALL):
            async with engine_of(layered) as engine:
                started, events = await events_of(engine, prompt, text)
                await idle(engine)
            assert [event.token for event in events] == (greedy(prompt, COUNT) if text == "full" else expected(prompt, text))
            assert (started.sources.pool > 0) == (layer is None and text != SMALL[1])


async def test_a_cancelled_sequence_gives_everything_back(engine_of: EngineMaker, prompts: Prompts, expected: Expected) -> None:
    """Hung up in the prompt or in the answer; the other one goes on."""
    prompt = prompts(70)
    async with engine_of(NullStore()) as engine:
        stayer = asyncio.create_task(answer(engine, prompt, SMALL[1], max_tokens=30))
        for wanted in (0, 1, 5):
            stream: Any = engine.decode(DecodeRequest(request_id="x", prompt=prompts(300), max_tokens=100, attention=SMALL[1]))
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            if not wanted:
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for _ in range(wanted):
                await anext(stream)
            await stream.aclose()
        assert await stayer == expected(prompt, SMALL[1], 30)
        await idle(engine)


@pytest.mark.parametrize(
    ("text", "says"), [("nonsense", "there are full, streaming"), ("quest:page=0", "page is at least 1"), ("h2o:heavy=2", "heavy")]
)
async def test_a_technique_that_is_not_there_is_refused_for_that_request(
    engine_of: EngineMaker, prompts: Prompts, greedy: Greedy, text: str, says: str
) -> None:
    """With a reason, and nobody else notices."""
    async with engine_of(NullStore()) as engine:
        with pytest.raises(ConfigError, match=says):
            await answer(engine, prompts(9), text)
        assert await answer(engine, prompts(9), "full") == greedy(prompts(9), COUNT)


async def test_sinks_are_not_moved_in_a_model_whose_keys_turn_otherwise(engine_of: EngineMaker, model: Model, prompts: Prompts) -> None:
    """Its answers would be wrong without a word. Where positions stay those of the text it is served."""
    other = copy.copy(model)
    other.__dict__["frequencies"] = None
    async with engine_of(NullStore(), model=other) as engine:
        with pytest.raises(ConfigError, match="positions=original"):
            await answer(engine, prompts(40), "streaming")
        assert len(await answer(engine, prompts(40), "streaming:positions=original")) == COUNT
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="positions=original"):
        async with engine_of(NullStore(), model=other, attention=parse_attention("streaming")):
            pass
    assert threading.active_count() == threads  # or the worker's process would never end


class Recorder:
    """Every key that somebody else may find something by: the worker's names, and what a store was given, hand-offs included."""

    def __init__(self, patch: pytest.MonkeyPatch, store: MemoryStore) -> None:
        self.store = store
        self.named: set[BlockKey] = set()
        name = BlockManager.name

        def noted(manager: BlockManager, key: BlockKey, *what: Any) -> None:
            self.named.add(key)
            name(manager, key, *what)

        patch.setattr(BlockManager, "name", noted)

    @property
    def keys(self) -> set[BlockKey]:
        return self.named | {key for key, _ in self.store.pushed}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_no_tainted_block_has_a_name_for_anybody(
    model: Model, engine_of: EngineMaker, prompts: Prompts, expected: Expected, data: st.DataObject
) -> None:
    """Whatever is asked at once, in little memory or much: all that is named, stored or handed off is KV of full attention."""
    texts = data.draw(st.lists(st.sampled_from(["full", *SMALL, *LATE]), min_size=1, max_size=5))
    asked = [(prompts(data.draw(st.integers(60, 76)), seed=data.draw(st.integers(0, 2))), text) for text in texts]
    room = data.draw(st.sampled_from([300 * 512, 1 << 24]))
    store = MemoryStore(model.geometry.bytes_per_token)
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch, store)
        async with engine_of(store, kv_bytes=room, resident_bytes=1 << 18) as engine:
            answers = await asyncio.gather(*(answer(engine, prompt, text, max_tokens=16) for prompt, text in asked))
            await idle(engine)
            chains = {
                key: (*prompt, *tokens) for (prompt, _), tokens in zip(asked, answers, strict=True) for key in _keys(model, prompt, tokens)
            }
            left = _left(engine, recorder.named)
    assert recorder.keys
    for key in recorder.keys:
        tokens, index = chains[key], _keys(model, chains[key]).index(key)
        truth = _pure(model, tokens[: (index + 1) * BLOCK], index)
        for payload in (store.blocks.get(key), left.get(key)):
            assert payload is None or np.allclose(payload.view(np.float32), truth, atol=1e-3)


def _keys(model: Model, prompt: tuple[int, ...], tokens: Any = ()) -> list[BlockKey]:
    return chain_keys(model.namespace.root(), (*prompt, *tokens), BLOCK)


def _pure(model: Model, tokens: tuple[int, ...], index: int) -> Any:
    """The payload that full attention gives block `index` of `tokens`."""
    cache = model.new_cache(capacity=len(tokens), limit=len(tokens))
    model.extend(cache, tokens)
    payload = np.empty(BLOCK * model.geometry.bytes_per_token, np.uint8)
    cache.copy_block(index, BLOCK, payload)
    return payload.view(np.float32)


def _left(engine: Engine, keys: set[BlockKey]) -> dict[BlockKey, Any]:
    """The payloads that the worker itself still has under `keys`."""
    found = {}
    for key in keys:
        blocks, tokens = engine._scheduler.manager.match([key])
        if tokens == BLOCK:
            found[key] = np.empty(BLOCK * engine._parts.model.geometry.bytes_per_token, np.uint8)
            engine._kv.copy_block(blocks[0], BLOCK, found[key])
    return found
