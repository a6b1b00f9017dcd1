"""A package that looks to `kvpool connect-check` like an installed vLLM: its version, its connector contract, its reading of flags."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BASE = """
from abc import ABC, abstractmethod
from enum import Enum

class KVConnectorRole(Enum):
    SCHEDULER, WORKER = 0, 1

class KVConnectorMetadata: ...
class KVConnectorHandshakeMetadata: ...
class KVConnectorWorkerMetadata: ...

class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...

class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config, role, kv_cache_config): ...
    @abstractmethod
    def start_load_kv(self, forward_context, **kwargs): ...
    @abstractmethod
    def wait_for_layer_load(self, layer_name): ...
    @abstractmethod
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    @abstractmethod
    def wait_for_save(self): ...
    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...
    @abstractmethod
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...
    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...
"""
_MORE = """    @abstractmethod
    def {name}(self, request): ...
"""
_ARGUMENTS = """
import json
from pathlib import Path
from types import SimpleNamespace as Space

VALUES = json.loads((Path(__file__).parents[1] / "values.json").read_text())

class EngineArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--model", default="")
        parser.add_argument("--block-size", type=int, default=VALUES["block_tokens"])
        parser.add_argument("--tensor-parallel-size", type=int, default=1)
        return parser

    @classmethod
    def from_cli_args(cls, arguments):
        self = cls()
        self.arguments = arguments
        return self

    def create_engine_config(self):
        values, said = VALUES, self.arguments
        model = Space(
            model=said.model, dtype=values["dtype"], max_model_len=values["tokens"], is_hybrid=values["hybrid"], use_mla=False,
            hf_config=Space(to_dict=dict), quantization=None, get_num_layers=lambda parallel: values["layers"],
            get_num_kv_heads=lambda parallel: values["heads"], get_head_size=lambda: values["head"], get_sliding_window=lambda: None,
        )
        cache = Space(
            block_size=said.block_size, prefix_caching_hash_algo=values["hash"], enable_prefix_caching=values["prefix_caching"],
            cache_dtype="auto",
        )
        parallel = Space(tensor_parallel_size=said.tensor_parallel_size, pipeline_parallel_size=1)
        return Space(model_config=model, cache_config=cache, parallel_config=parallel, load_config=Space(load_format="auto"))
"""
_CONFIG = """
class KVTransferConfig:
    def __init__(self, **fields):
        if fields.get("kv_role") not in ("kv_both", "kv_producer", "kv_consumer"):
            raise ValueError(f"unsupported kv_role {fields.get('kv_role')}")
"""
VALUES: dict[str, Any] = {
    "block_tokens": 16, "dtype": "torch.bfloat16", "tokens": 2048, "hybrid": False, "layers": 2, "heads": 1, "head": 64, "hash": "sha256",
    "prefix_caching": True,
}  # fmt: skip
"""What the engine's configuration comes to, unless flags say otherwise."""


def write_vllm(directory: Path, *, version: str = "0.32.0", wants: str = "", values: Mapping[str, Any] | None = None) -> Path:
    """Put the package into `directory`, which is to be on PYTHONPATH. `wants`: an abstract method that no connector knows of."""
    base = "distributed/kv_transfer/kv_connector/v1"
    files = {
        "__init__.py": f"__version__ = {version!r}\n",
        "config.py": _CONFIG,
        "logger.py": "from logging import getLogger as init_logger\n",
        "values.json": json.dumps({**VALUES, **(values or {})}),
        f"{base}/base.py": _BASE + (_MORE.format(name=wants) if wants else ""),
        f"{base}/metrics.py": "class KVConnectorStats: ...\nclass KVConnectorPromMetrics: ...\n",
        "distributed/kv_events.py": "class BlockStored: ...\n",
        "v1/core/kv_cache_utils.py": "def maybe_convert_block_hash(name): ...\n",
        "engine/arg_utils.py": _ARGUMENTS,
        "utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
    }
    for name, text in files.items():
        path = directory / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    write_distribution(directory, "vllm", version)
    return directory


def write_distribution(directory: Path, name: str, version: str) -> None:
    """What pip would say of an installed package."""
    place = directory / f"{name}-{version}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
