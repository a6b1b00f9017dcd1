"""What this project uses of SGLang 0.5.23's storage contract, for where SGLang isn't: the same names, arguments and results.

`install` makes it importable as `sglang`. The tests of `tests/engines` run the same contract (`sglang_contract.py`) on the real package.
"""

import abc
import importlib
import sys
import types
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


@dataclass
class HiCacheStorageConfig:
    """Who an engine's rank is."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


@dataclass
class HiCacheStorageExtraInfo:
    """What comes along with a call."""

    prefix_keys: list[str] | None = None
    extra_info: dict[str, Any] | None = None


class PoolName(StrEnum):
    """Some host pools."""

    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"
    DRAFT = "draft"


class PoolHitPolicy(StrEnum):
    """See `kvpool/connectors/sglang/hits.py`."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    """Pages of one host pool."""

    name: PoolName
    host_indices: Any = None
    device_indices: Any = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    """How far a prefix can be restored."""

    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None


@dataclass
class StorageMetrics:
    """What moved."""

    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class HiCacheStorage(abc.ABC):
    """The base class: these five are abstract."""

    @abc.abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """A tensor, or None."""

    @abc.abstractmethod
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        """Tensors, or None each."""

    @abc.abstractmethod
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Whether it is there now."""

    @abc.abstractmethod
    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """Whether all are there now."""

    @abc.abstractmethod
    def exists(self, key: str) -> bool:
        """Whether it is there."""


class StorageBackendFactory:
    """Makes a dynamic backend as SGLang's does."""

    @classmethod
    def create_backend(cls, backend_name: str, storage_config: HiCacheStorageConfig, mem_pool_host: Any, **kwargs: Any) -> Any:
        """By `module_path` and `class_name` of the extra config; the class gets the config and a dictionary."""
        extra = storage_config.extra_config or {}
        assert backend_name == "dynamic", backend_name
        assert {"backend_name", "module_path", "class_name"} <= set(extra)
        made = getattr(importlib.import_module(extra["module_path"]), extra["class_name"])
        assert issubclass(made, HiCacheStorage)
        return made(storage_config, kwargs)


_HOMES: dict[str, tuple[type, ...]] = {
    "sglang.srt.mem_cache.hicache_storage": (
        HiCacheStorage, HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName, PoolHitPolicy, PoolTransfer, PoolTransferResult,
    ),
    "sglang.srt.mem_cache.storage.backend_factory": (StorageBackendFactory,),
    "sglang.srt.observability.metrics_collector": (StorageMetrics,),
}  # fmt: skip


def install() -> None:
    """Make `sglang` importable in this process, if it isn't."""
    if "sglang" in sys.modules:
        return
    for home, names in _HOMES.items():
        parts = home.split(".")
        for count in range(1, len(parts) + 1):
            path = ".".join(parts[:count])
            sys.modules.setdefault(path, types.ModuleType(path))
        for one in names:
            setattr(sys.modules[home], one.__name__, one)
    version = sys.modules["sglang.version"] = types.ModuleType("sglang.version")
    version.__dict__["__version__"] = "0.5.23"
