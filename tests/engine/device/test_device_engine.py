"""The engine with weights and KV on a device: the tokens of `transformers`, whatever moves meanwhile. On a twin, and on a GPU."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import torch

from kvpool.block import chain_keys
from kvpool.engine.device.store import DeviceKvStore
from kvpool.engine.device.streams import CudaDevice, Device
from kvpool.engine.engine import Engine
from kvpool.engine.model import Model, load_model
from kvpool.engine.settings import EngineSettings
from kvpool.engine.store import MemoryStore
from kvpool.errors import ConfigError
from kvpool.request import DecodeRequest, FirstToken, PrefillRequest, TokenOut
from kvpool.testing.layered_store import LayeredMemoryStore
from kvpool.testing.stream_twin import TwinDevice

BLOCK = 8
Prompts = Callable[..., tuple[int, ...]]
Greedy = Callable[[tuple[int, ...], int], list[int]]
EngineMaker = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture(params=["twin", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "twin":
        return TwinDevice(5)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return CudaDevice("cuda")


@pytest.fixture
def placed(device: Device, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The tiny model on the device; it has the name that it has on the CPU."""
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "cache"))
    return load_model(tiny, dtype="float32", block_tokens=BLOCK, device=device)


async def tokens_of(engine: Engine, prompt: tuple[int, ...], count: int) -> list[int]:
    request = DecodeRequest(request_id="d", prompt=prompt, max_tokens=count)
    return [event.token async for event in engine.decode(request) if isinstance(event, TokenOut)]


async def first_of(engine: Engine, prompt: tuple[int, ...]) -> FirstToken:
    first, _ = [event async for event in engine.prefill(PrefillRequest(request_id="p", prompt=prompt))]
    assert isinstance(first, FirstToken)
    return first


async def test_tokens_are_those_of_transformers_whatever_moves(
    engine_of: EngineMaker, placed: Model, prompts: Prompts, greedy: Greedy
) -> None:
    """Prefixes shared, computed elsewhere and loaded; more sequences than there is memory for; blocks in many pieces."""
    trunk = prompts(90)
    asked = [(*trunk[: 30 * (i % 4)], *prompts(5 + 7 * i, seed=i)) for i in range(8)]
    store, most = MemoryStore(placed.geometry.bytes_per_token), 512 * placed.geometry.bytes_per_token
    async with engine_of(store, model=placed, kv_bytes=most) as one, engine_of(store, model=placed, kv_bytes=most) as two:
        assert isinstance(two._kv, DeviceKvStore)
        for prompt in asked[::2]:
            assert (await first_of(one, prompt)).token == greedy(prompt, 1)[0]
        answers = await asyncio.gather(*(tokens_of(two, prompt, 60) for prompt in asked))
        assert answers == [greedy(prompt, 60) for prompt in asked]
        assert two.gathered_bytes > 0
        assert two.preemptions > 0
    assert sum(done for _, _, done in store.loads) > 0


async def test_layers_come_while_they_are_computed_with(engine_of: EngineMaker, placed: Model, prompts: Prompts, greedy: Greedy) -> None:
    """The pass is issued layer by layer, as they come."""
    store, shared = LayeredMemoryStore(placed.geometry), prompts(96)
    async with engine_of(store, model=placed) as one:
        await first_of(one, shared)
    store.bytes_per_s = 96 * store.geometry.bytes_per_token / 0.05
    async with engine_of(store, model=placed) as two:
        for length in (1, 9, 40):
            prompt = (*shared, *prompts(length, seed=length))
            assert await tokens_of(two, prompt, 8) == greedy(prompt, 8)
    assert store.streamed > 0


async def test_blocks_of_a_device_serve_the_cpu(engine_of: EngineMaker, model: Model, placed: Model, prompts: Prompts) -> None:
    """The same names and the same bytes but for rounding: a block that was computed here can be used there."""
    prompt, stores = prompts(40), [MemoryStore(model.geometry.bytes_per_token) for _ in range(2)]
    for store, of in zip(stores, (model, placed), strict=True):
        async with engine_of(store, model=of) as engine:
            await first_of(engine, prompt)
    for key in chain_keys(model.namespace.root(), prompt, BLOCK):
        one, other = (torch.from_numpy(store.blocks[key].copy()).view(torch.float32) for store in stores)
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "no device 'tpu'; there are cpu"),
        ({"device": "cuda:"}, "no device"),
        ({"device": "cuda", "layout": "vattention"}, "leave --layout out"),
        ({"device": "cuda:1", "steady": True}, "leave --deterministic out"),
    ],
)
def test_what_only_the_cpu_does_is_refused_for_a_device(settings: dict[str, str], message: str) -> None:
    """Before anything is loaded."""
    assert EngineSettings(device="cuda:1").device == "cuda:1"
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**settings)  # type: ignore[arg-type]
