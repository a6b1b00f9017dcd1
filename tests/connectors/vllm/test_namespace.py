"""Any difference between engines that makes their KV another is another namespace, hence a miss."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvpool.connectors.vllm.facts import (
    adapter_digest,
    check_groups,
    check_parallel,
    digest_of_weights,
    engine_facts,
    part_of,
    tensor_facts,
)
from kvpool.connectors.vllm.layout import layers_of
from kvpool.connectors.vllm.namespace import Part, geometry_of, namespace_of
from kvpool.errors import ConfigError

BLOCKS = 6


class Backend:
    """An attention backend."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_name(self) -> str:
        return self.name


def config(**changes: Any) -> Any:
    """A `VllmConfig`, as far as it is read."""
    model = {"hidden_size": 64, "rope_theta": 1e4, "_name_or_path": changes.get("path", "/models/a")} | changes.get("hf", {})
    hf = SimpleNamespace(to_dict=lambda: model, original_max_position_embeddings=changes.get("original"))
    layer = SimpleNamespace(attn_backend=Backend(changes.get("backend", "CPU_ATTN")), isa=changes.get("isa", "amx"))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hf,
            dtype=changes.get("dtype", "torch.bfloat16"),
            quantization=changes.get("quantization"),
            max_model_len=changes.get("max_model_len", 4096),
        ),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto"), block_size=changes.get("block_size", 16)),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=changes.get("tp", 1), pipeline_parallel_size=changes.get("pp", 1), rank=changes.get("rank", 0)
        ),
        compilation_config=SimpleNamespace(static_forward_context={"a": layer, "b": layer}),
        speculative_config=changes.get("draft"),
    )


def root(version: str = "0.32.0", weights: bytes = b"w", salt: bytes = b"", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> bytes:
    one, size = config(**changes), changes.get("block_size", 16)
    shape = changes.get("shape", (BLOCKS, 2, size, 8))
    tensors = {"a": torch.empty(shape, dtype=dtype), "b": torch.empty(shape, dtype=dtype)}
    layers = layers_of(tensors, BLOCKS)
    part, _ = part_of(one, 1)
    facts = engine_facts(one, version) | tensor_facts(one, tensors, layers, BLOCKS, changes.get("layout", "LBHNC"))
    return namespace_of(facts, weights=weights, layer_bytes=layers.layer_bytes, block_tokens=size, part=part, salt=salt).root()


@pytest.mark.parametrize(
    "changes",
    [
        {"version": "0.32.1"},
        {"weights": b"x"},
        {"salt": b"s"},
        {"hf": {"rope_theta": 5e5}},
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"cache_dtype": "fp8"},
        {"block_size": 32},
        {"tp": 2},
        {"pp": 2},
        {"tp": 2, "rank": 1},
        {"backend": "FLASH_ATTN"},
        {"isa": "vec"},
        {"layout": "BLNHC"},
        {"shape": (BLOCKS, 16, 2, 8)},
        {"original": 2048},
        {"draft": SimpleNamespace(method="eagle", model="m")},
    ],
    ids=str,
)
def test_other_engine_is_another_namespace(changes: dict[str, Any]) -> None:
    """Wrong model, dtype, block size, layout, instructions or version never hits."""
    assert root(**changes) != root()


def test_place_of_the_model_and_number_of_blocks_do_not_matter() -> None:
    """The same files elsewhere, on a machine with more memory, are the same model."""
    assert root(path="/mnt/b") == root()
    assert root(max_model_len=8192) == root()


def test_ranks_that_hold_the_same_share_a_part() -> None:
    """The first of them saves for all."""
    four = [part_of(config(tp=4, pp=2, rank=rank), 2) for rank in range(8)]
    assert [(part.rank, part.size, saves) for part, saves in four] == [
        (0, 4, True),
        (0, 4, False),
        (1, 4, True),
        (1, 4, False),
        (2, 4, True),
        (2, 4, False),
        (3, 4, True),
        (3, 4, False),
    ]


@pytest.mark.parametrize(
    ("layer_bytes", "tokens", "said"),
    [
        ([64], 1024, "--block-size 512 or less"),
        ([], 16, "registers 0 KV tensors"),
        ([33], 16, "2-byte elements"),
        ([0], 16, "2-byte elements"),
    ],
)
def test_blocks_that_cannot_be_stored_are_refused(layer_bytes: list[int], tokens: int, said: str) -> None:
    """At the start, with what to do."""
    with pytest.raises(ConfigError, match=said):
        geometry_of(layer_bytes, tokens)


def test_geometry_takes_the_bytes_of_all_layers() -> None:
    """Payload and tensors agree to the byte, also where layers differ."""
    assert geometry_of([1024, 512], 16).payload_bytes(16) == 1536
    assert namespace_of({}, weights=b"w", layer_bytes=[64], block_tokens=16, part=Part()).geometry.payload_bytes(16) == 64


def test_several_groups_of_layers_and_spread_blocks_are_refused() -> None:
    """With the flag that helps."""
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))
    assert check_groups([group]) == 16
    with pytest.raises(ConfigError, match="--disable-hybrid-kv-cache-manager"):
        check_groups([group, group])
    with pytest.raises(ConfigError, match="decode_context_parallel_size is 2"):
        check_parallel(SimpleNamespace(decode_context_parallel_size=2))
    check_parallel(SimpleNamespace())


def test_weights_are_told_by_their_bytes_or_by_the_operator(tmp_path: Any) -> None:
    """Never by a name alone: a directory may be overwritten."""
    model = SimpleNamespace(model=str(tmp_path), revision=None)
    with pytest.raises(ConfigError, match='set "weights" in kv_connector_extra_config'):
        digest_of_weights(model, "auto", "")
    with pytest.raises(ConfigError, match="load-format dummy"):
        digest_of_weights(model, "dummy", "")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = digest_of_weights(model, "auto", "")
    (tmp_path / "model.safetensors").write_bytes(b"22")
    assert len({first, digest_of_weights(model, "auto", ""), digest_of_weights(model, "auto", "v2")}) == 3


def test_adapter_is_told_by_its_bytes(tmp_path: Any) -> None:
    """Name and path alone may be another adapter's on another machine."""
    lora = SimpleNamespace(lora_request=SimpleNamespace(lora_path=str(tmp_path)))
    assert adapter_digest(SimpleNamespace(lora_request=None)) == b""
    assert adapter_digest(lora) is None
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    assert len(adapter_digest(lora) or b"") == 32
