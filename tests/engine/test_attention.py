"""One pass over many sequences: the scores and KV that each would have alone, for every family and kind of head."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvpool.engine.attention.dense import one_token
from kvpool.engine.model import Model, load_model
from kvpool.engine.packed import packable
from kvpool.engine.paged.attention import Segment
from kvpool.engine.paged.store import KvStore
from kvpool.errors import ConfigError
from tests.engine.conftest import tiny_config

SIZE = 8
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,
    "max_position_embeddings": 256, "initializer_range": 0.3, "head_dim": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4,
    "first_k_dense_replace": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama gqa": lambda: LlamaForCausalLM(tiny_config()),
    "llama mha": lambda: LlamaForCausalLM(tiny_config(num_key_value_heads=4)),
    "llama mqa": lambda: LlamaForCausalLM(tiny_config(num_key_value_heads=1)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2, use_sliding_window=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, use_sliding_window=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None)),
    "deepseek mla": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**{**SHAPE, **LATENT, "head_dim": 8}, num_key_value_heads=4)),
}


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, Any]:
    """A model as the engine runs it, and as transformers does."""
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(3)
    network = FAMILIES[request.param]().eval()
    network.save_pretrained(tmp_path / "model")
    return load_model(tmp_path / "model", dtype="float32", block_tokens=SIZE), network


def scattered(store: KvStore, tokens: int, rng: random.Random, taken: set[int]) -> list[int]:
    """Blocks for `tokens` tokens, anywhere but in `taken`."""
    blocks = rng.sample([block for block in range(store.blocks) if block not in taken], -(-tokens // SIZE))
    taken.update(blocks)
    return blocks


def test_pass_over_many_sequences_equals_transformers_alone(pair: tuple[Model, Any]) -> None:
    """Chunks and single tokens of sequences with scattered blocks, in one pass: each as if it were computed whole and by itself."""
    model, network = pair
    rng = random.Random(1)
    store, taken = KvStore(model.geometry, 64), set[int]()
    prompts = [rng.choices(range(256), k=length) for length in (1, 9, 16, 40, 33)]
    tables = [scattered(store, len(prompt), rng, taken) for prompt in prompts]
    cuts = [0, 8, 15, 23, 5]
    model.run(store, [Segment(t, 0, p[:cut], scores=False) for t, p, cut in zip(tables, prompts, cuts, strict=True) if cut])
    scores = model.run(store, [Segment(t, cut, p[cut:]) for t, p, cut in zip(tables, prompts, cuts, strict=True)])
    with torch.inference_mode():
        for prompt, row in zip(prompts, scores, strict=True):
            expected = network(torch.tensor([prompt])).logits[0, -1]
            assert torch.allclose(row, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
            assert row.argmax() == expected.argmax()


def test_scattered_blocks_give_the_bits_of_blocks_in_one_piece(model: Model) -> None:
    """Where blocks lie changes nothing: what is gathered is read as if it had lain there."""
    prompt = random.Random(2).choices(range(256), k=61)
    found = []
    for blocks in (range(3, 11), [9, 3, 4, 20, 11, 2, 31, 0]):
        store = KvStore(model.geometry, 32)
        model.run(store, [Segment(blocks, 0, prompt[:37], scores=False)])
        found.append(model.run(store, [Segment(blocks, 37, prompt[37:])]))
        assert bool(store.gathered_bytes) == isinstance(blocks, list)
    assert torch.equal(*found)


def test_bits_depend_on_the_segment_alone_when_steady(model: Model) -> None:
    """Batch invariance, bit for bit: alone, with one, with many, before or behind them."""
    rng = random.Random(4)
    prompt, others = rng.choices(range(256), k=30), [rng.choices(range(256), k=9) for _ in range(6)]

    def scores(before: int, behind: int) -> torch.Tensor:
        store = KvStore(model.geometry, 64)
        company = [Segment(range(8 + 2 * i, 10 + 2 * i), 0, other) for i, other in enumerate(others)]
        row = torch.empty(0)
        for start, end in ((0, 29), (29, 30)):
            mine = Segment(range(4), start, prompt[start:end])
            row = model.run(store, [*company[:before], mine, *company[before : before + behind]], steady=True)[before]
        return row

    alone = scores(0, 0)
    for before, behind in ((0, 1), (1, 0), (3, 3), (6, 0)):
        assert torch.equal(scores(before, behind), alone)


class Window:
    """Attends to the last `width` tokens only; notes what it was given."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.seen: list[tuple[int, int, int]] = []

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, start: int, scale: float | None
    ) -> torch.Tensor:
        self.seen.append((layer, start, keys.shape[2]))
        keys, values = keys[:, :, -self.width :], values[:, :, -self.width :]
        return one_token(query, keys, values, scale)


def test_reader_of_one_sequence_leaves_the_others_alone(model: Model) -> None:
    """A technique is a request's own: what it attends to changes its scores, and nobody else's bits."""
    prompts = [random.Random(i).choices(range(256), k=20) for i in range(2)]
    results = []
    for reader in (None, Window(99), Window(4)):
        store = KvStore(model.geometry, 8)
        model.run(store, [Segment(range(4 * i, 4 * i + 4), 0, prompt, scores=False) for i, prompt in enumerate(prompts)])
        results.append(model.run(store, [Segment(range(4), 20, [7], reader=reader), Segment(range(4, 8), 20, [8])]))
        if reader is not None:
            assert reader.seen == [(0, 20, 21), (1, 20, 21)]
    full, wide, narrow = results
    assert torch.equal(full, wide)
    assert torch.equal(full[1], narrow[1])
    assert not torch.allclose(full[0], narrow[0], atol=1e-3)


def test_pass_outside_the_engine_is_refused(model: Model) -> None:
    """Without a store there is nothing to attend to, and no falling back to something else."""
    with pytest.raises(ConfigError, match="hand arguments on"):
        model._network(torch.tensor([[1, 2, 3]]))


def test_packed_weights_choose_the_tokens_of_mapped_ones(tiny: Path, model: Model) -> None:
    """Another order of the same sums, in every linear layer; where there are no kernels for it the layers stay as they were."""
    prompt = random.Random(6).choices(range(256), k=50)
    rows = []
    for packed in (True, False):
        loaded = load_model(tiny, dtype="float32", block_tokens=SIZE, packed=packed)
        layers = [module for module in loaded._network.modules() if isinstance(module, torch.nn.Linear)]
        assert bool(layers) != (packed and packable(torch.float32))
        rows.append(loaded.run(KvStore(loaded.geometry, 8), [Segment(range(8), 0, prompt)]))
    assert torch.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-4)
    assert rows[0].argmax() == rows[1].argmax()
