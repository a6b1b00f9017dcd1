"""A tiny random Llama for the engine's tests: quick, and with scores far enough apart that greedy choices are stable."""

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from time import monotonic_ns
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as chatter

import kvpool.engine.patience
import kvpool.engine.prefill
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model, load_model
from kvpool.engine.settings import EngineSettings
from kvpool.engine.store import BlockStore
from kvpool.units import MIB, SECOND

BLOCK, CHUNK = 8, 32
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]


def tiny_config(**changes: Any) -> LlamaConfig:
    """Two layers, hidden 64, 4 heads, 2 KV heads, 256 tokens of vocabulary."""
    fields = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 256, "max_position_embeddings": 512, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return LlamaConfig(**{**fields, **changes})


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a load may take longer than the few tokens of these tests are worth."""
    for module in (kvpool.engine.prefill, kvpool.engine.patience):
        monkeypatch.setattr(module, "LOAD_FLOOR_NS", 30 * SECOND)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a saved tiny model."""
    torch.set_num_threads(1)
    chatter.disable_progress_bar()
    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("tiny") / "model"
    LlamaForCausalLM(tiny_config()).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The tiny model in float32, in blocks of 8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPOOL_CACHE", str(tmp_path_factory.mktemp("cache")))
        return load_model(tiny, dtype="float32", block_tokens=BLOCK)


@pytest.fixture
def engine_of(model: Model, unhurried: None) -> EngineMaker:
    """`async with engine_of(store, **settings) as engine`."""

    @asynccontextmanager
    async def make(store: BlockStore, **settings: Any) -> AsyncIterator[Engine]:
        engine = Engine(
            settings.pop("model", model),
            store,
            EngineSettings(**{"chunk_tokens": CHUNK, "resident_bytes": 0, "kv_bytes": 64 * MIB} | settings),
        )
        try:
            yield engine
        finally:
            await engine.close(monotonic_ns() + 10 * SECOND)

    return make


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """A random prompt of `length` tokens."""
    return tuple(random.Random(seed).choices(range(256), k=length))


@pytest.fixture
def prompts() -> Callable[..., tuple[int, ...]]:
    """`prompts(length, seed=0)`: a random prompt."""
    return prompt_of


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Any:
    """The same model as `transformers` runs it, with nothing of ours in it."""
    return LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def greedy(reference: Any) -> Callable[[tuple[int, ...], int], list[int]]:
    """What `transformers` itself generates greedily."""

    def run(prompt: tuple[int, ...], count: int) -> list[int]:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return [int(token) for token in out[0, len(prompt) :]]

    return run
