"""Loading: the identity of a model's blocks, and clear refusals of models this engine can't serve."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen2ForCausalLM

from kvpool.block import LayerSpec
from kvpool.engine.identity import geometry_of, unsupported
from kvpool.engine.model import Model, load_model
from kvpool.errors import ConfigError


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def _rewrite(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_load_model_derives_geometry_and_limits(model: Model) -> None:
    """Blocks hold what the model caches: all layers, KV heads (not query heads), its dtype."""
    assert model.geometry.layers == (LayerSpec("full", 2, 16, 16),) * 2
    assert (model.geometry.block_tokens, model.geometry.dtype) == (8, "float32")
    assert (model.context_tokens, model.vocabulary) == (512, 256)


def test_namespace_is_the_same_for_a_copy_and_under_another_name(model: Model, copy: Path) -> None:
    """Two hosts with the same model share blocks, wherever it lies and whatever saved its config."""
    _rewrite(copy, _name_or_path="/elsewhere", transformers_version="9.9", eos_token_id=3)
    assert load_model(copy, dtype="float32", block_tokens=8).namespace == model.namespace


def test_namespace_differs_by_all_that_changes_the_kv(model: Model, copy: Path) -> None:
    """Another dtype, block size, setting or weight is another identity."""
    roots = {model.namespace.root()}
    roots.add(load_model(copy, dtype="bfloat16", block_tokens=8).namespace.root())
    roots.add(load_model(copy, dtype="float32", block_tokens=16).namespace.root())
    _rewrite(copy, rms_norm_eps=1e-5)
    roots.add(load_model(copy, dtype="float32", block_tokens=8).namespace.root())
    _rewrite(copy, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    roots.add(load_model(copy, dtype="float32", block_tokens=8).namespace.root())
    torch.manual_seed(2)
    LlamaForCausalLM(LlamaConfig.from_pretrained(copy)).save_pretrained(copy)
    roots.add(load_model(copy, dtype="float32", block_tokens=8).namespace.root())
    assert len(roots) == 6


def test_load_model_of_another_family_works(tmp_path: Path) -> None:
    """Any plain causal decoder with rotary positions, not only Llama."""
    config = Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, vocab_size=64,
        max_position_embeddings=128, use_sliding_window=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    assert load_model(tmp_path / "qwen", dtype="float32", block_tokens=16).geometry.layers == (LayerSpec("full", 1, 8, 8),) * 2


def test_load_model_with_missing_weights_is_refused(copy: Path) -> None:
    """transformers would fill them with random numbers and go on."""
    _rewrite(copy, num_hidden_layers=3)
    with pytest.raises(ConfigError, match="lacks weights the model needs"):
        load_model(copy, dtype="float32", block_tokens=8)


def test_load_model_of_a_broken_directory_is_a_configuration_error(copy: Path, tmp_path: Path) -> None:
    """Damaged files are told by name, not by a traceback."""
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_model(tmp_path, dtype="float32", block_tokens=8)
    next(copy.glob("*.safetensors")).write_bytes(b"garbage!" * 10)
    with pytest.raises(ConfigError, match="can't be loaded"):
        load_model(copy, dtype="float32", block_tokens=8)
    next(copy.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(copy, dtype="float32", block_tokens=8)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "rotary"),
        (MistralConfig(sliding_window=4096), "sliding window of 4096"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "'dynamic'"),
        (LlamaConfig(max_position_embeddings=8), "context of 8"),
        (SimpleNamespace(model_type="odd"), "lacks num_hidden_layers"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_geometry_of_what_cannot_be_served_says_why(config: Any, reason: str) -> None:
    """A model whose blocks would not be a function of the prefix must not get as far as the pool."""
    with pytest.raises(ConfigError, match=reason):
        geometry_of(config, dtype="float32", block_tokens=16)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_lora_rank": 512}, "MLA"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"attention_chunk_size": 8192}, "chunks of 8192"),
        ({}, ""),
    ],
)
def test_unsupported_names_the_property(fields: dict[str, Any], reason: str) -> None:
    """Each kind of attention we don't store is refused for its own reason, and the plain one isn't."""
    plain = LlamaConfig(max_position_embeddings=128)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    shape = {n: getattr(plain, n) for n in ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings")}
    found = unsupported(SimpleNamespace(**shape, **rope, **fields))
    assert reason in found
    assert bool(found) == bool(reason)


def test_geometry_of_an_unknown_dtype_lists_the_known() -> None:
    """`--dtype half` should be answered with what to write."""
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        geometry_of(LlamaConfig(), dtype="half", block_tokens=16)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [("leave a layer unwritten", "unwritten"), ("look ahead", "earlier ones"), ("forget the cache", "reused")],
)
def test_load_model_checks_what_the_model_really_does(copy: Path, monkeypatch: pytest.MonkeyPatch, spoil: str, complaint: str) -> None:
    """A config can lie; a few tokens through the model can't."""
    extend, predict = Model.extend, Model.predict

    def spoiled(self: Model, cache: Any, tokens: Any) -> torch.Tensor:
        scores = predict(self, cache, tokens)
        if spoil == "leave a layer unwritten":
            cache.store.values[1] = torch.nan
        if spoil == "look ahead":
            cache.store.values[1, :, 0] += tokens[-1]
        return scores

    def forgetting(self: Model, cache: Any, tokens: Any) -> None:
        extend(self, cache, tokens)
        for array in (cache.store.keys, cache.store.values):
            array[:] = 0.0

    monkeypatch.setattr(Model, "predict", spoiled)
    if spoil == "forget the cache":
        monkeypatch.setattr(Model, "extend", forgetting)
    with pytest.raises(ConfigError, match=complaint):
        load_model(copy, dtype="float32", block_tokens=8)
