"""What of a running vLLM tells its KV from another's: collected from vLLM's own objects, by name, for the namespace (`namespace.py`)."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvpool.config.models import weights_digest
from kvpool.connectors.vllm.layout import Layers
from kvpool.connectors.vllm.namespace import Part
from kvpool.errors import ConfigError

_NOT_THE_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "architectures_mapping")


def engine_facts(config: Any, version: str) -> dict[str, str]:
    """What vLLM's configuration says. `config` is a `VllmConfig`."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    return {
        "vllm": version,
        "model": _config_digest(model.hf_config),
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "long_context": _long_context(model),
        "cache_dtype": str(cache.cache_dtype),
        "calculate_kv_scales": str(getattr(cache, "calculate_kv_scales", False)),
        "block_tokens": str(cache.block_size),
        "tensor_parallel": str(parallel.tensor_parallel_size),
        "pipeline_parallel": str(parallel.pipeline_parallel_size),
        "decode_context_parallel": str(getattr(parallel, "decode_context_parallel_size", 1)),
        "prefill_context_parallel": str(getattr(parallel, "prefill_context_parallel_size", 1)),
        "draft": _draft(config),
    }


def tensor_facts(config: Any, tensors: Mapping[str, Any], layers: Layers, blocks: int, layout: object) -> dict[str, str]:
    """What the registered tensors and their layers say: device, element type, shape and order of a block, attention backend, packing."""
    context = getattr(config.compilation_config, "static_forward_context", {})
    shapes = {_shape(tensors[name], blocks) for name in layers.names}
    backends = {_backend(context.get(name)) for name in layers.names}
    return {
        "device": str(next(iter(tensors.values())).device.type),
        "layout": str(layout),
        "shapes": " ".join(sorted(shapes)),
        "backends": " ".join(sorted(backends)),
        "layers": hashlib.sha256("\n".join(layers.names).encode()).hexdigest(),
    }


def part_of(config: Any, replicas: int) -> tuple[Part, bool]:
    """This rank's part of the KV, and whether it is the first of the `replicas` neighbouring tensor ranks that hold the same."""
    parallel = config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    stage, rank = divmod(parallel.rank % (tensor * pipeline), tensor)
    shares = max(1, tensor // max(1, replicas))
    return Part(rank=stage * shares + rank // max(1, replicas), size=pipeline * shares), rank % max(1, replicas) == 0


def digest_of_weights(model: Any, load_format: str, said: str) -> bytes:
    """The digest of the model's weights: of its safetensors, or of the text `said` to stand for them. Raises `ConfigError`."""
    if said:
        return hashlib.sha256(b"said:" + said.encode()).digest()
    say = '; set "weights" in kv_connector_extra_config to a text that names these weights, and is another when they change'
    if load_format == "dummy":
        raise ConfigError(f"the weights are made up (--load-format dummy), so blocks can't be shared{say}")
    try:
        return weights_digest(_directory(model))
    except (ConfigError, OSError) as error:
        raise ConfigError(f"which weights the model has can't be told: {error}{say}") from None


def adapter_digest(request: Any) -> bytes | None:
    """The digest of the weights of a request's LoRA adapter, b"" without one, None if they can't be read."""
    lora = getattr(request, "lora_request", None)
    if lora is None:
        return b""
    try:
        return weights_digest(Path(lora.lora_path))
    except (ConfigError, OSError, TypeError):
        return None


def _directory(model: Any) -> Path:
    """Where the model's files are: a directory, or the snapshot of a repository that was fetched already."""
    path = Path(model.model)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:
        raise ConfigError(f"{model.model} is no directory and no snapshot of it is here ({type(error).__name__})") from None


def _config_digest(hf_config: Any) -> str:
    values = {name: value for name, value in hf_config.to_dict().items() if name not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _long_context(model: Any) -> str:
    """Whether the longer set of rotary factors is in use, for models that choose by the longest sequence."""
    original = getattr(getattr(model, "hf_text_config", model.hf_config), "original_max_position_embeddings", None)
    return str(bool(original and model.max_model_len > original))


def _draft(config: Any) -> str:
    """A draft model adds layers to the KV."""
    speculative = getattr(config, "speculative_config", None)
    return "" if speculative is None else f"{speculative.method} {speculative.model}"


def _shape(tensor: Any, blocks: int) -> str:
    """Element type, shape (n where blocks are counted) and order of the axes, the widest stride first, of one layer."""
    shape = [("n" if size % blocks == 0 and size >= blocks else str(size)) for size in tensor.shape]
    order = sorted(range(len(shape)), key=lambda axis: -tensor.stride(axis))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(shape)}]{''.join(map(str, order))}"


def _backend(layer: Any) -> str:
    """The attention backend of a layer, and the instructions for which it packs."""
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend is not None else "unknown"
    return f"{name}:{getattr(layer, 'isa', '')}"


def check_parallel(parallel: Any) -> None:
    """Raise `ConfigError` where tokens of a block lie on several ranks."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"{name} is {getattr(parallel, name)}: a block's tokens lie on several ranks, which can't be stored; set it to 1"
            )


def check_groups(groups: Iterable[Any]) -> int:
    """Tokens of a block, if the engine keeps all of its layers' blocks in one table. Raises `ConfigError` otherwise."""
    every = list(groups)
    if len(every) != 1:
        raise ConfigError(
            f"this model's KV is kept in {len(every)} groups of layers, of which only one can be stored: "
            "start vLLM with --disable-hybrid-kv-cache-manager"
        )
    return int(every[0].kv_cache_spec.block_size)
