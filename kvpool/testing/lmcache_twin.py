"""A stand-in for what `kvpool.connectors.lmcache` takes from LMCache, where that isn't installed: the same names, far less behind them.

`tests/engines` runs the same kit (`l2_kit.py`) with LMCache's own classes, so that these can't drift from them.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

VERSION = "0.0.twin"
_ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2}


class Bitmap:
    """Bits, none set."""

    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def set(self, index: int) -> None:
        """Set one."""
        self._bits[index] = True

    def test(self, index: int) -> bool:
        """Whether one is set."""
        return self._bits[index]


class L2StoreResult(int):
    """Bytes, or -1 for a failure."""

    def __new__(cls, success: bool, bytes_transferred: int) -> "L2StoreResult":
        """-1 unless it succeeded."""
        return super().__new__(cls, bytes_transferred if success else -1)

    def is_successful(self) -> bool:
        """Whether it succeeded."""
        return self >= 0

    def bytes_transferred(self) -> int:
        """Bytes that were written."""
        return max(0, int(self))


@dataclass(frozen=True)
class ObjectKey:
    """As LMCache's, without its checks."""

    chunk_hash: bytes
    model_name: str
    kv_rank: int
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass
class Layout:
    """As `MemoryLayoutDesc`."""

    shapes: list[tuple[int, ...]]
    dtypes: list[str]


@dataclass
class Metadata:
    """As `MemoryObjMetadata`, as far as it counts."""

    shape: tuple[int, ...]
    dtype: str
    shapes: list[tuple[int, ...]] | None = None
    dtypes: list[str] | None = None


class Memory:
    """As `MemoryObj`: bytes and their layout."""

    def __init__(self, data: bytes, metadata: Metadata) -> None:
        self.metadata = metadata
        self.byte_array = memoryview(bytearray(data))

    def get_size(self) -> int:
        """Bytes."""
        return self.byte_array.nbytes


class L2AdapterInterface(ABC):
    """As LMCache's: the abstract methods, and what it is told."""

    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.told_stored: list[tuple[ObjectKey, int]] = []
        self.told_used: list[ObjectKey] = []

    def _notify_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.told_stored += zip(keys, sizes, strict=True)

    def _notify_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.told_used += keys

    @abstractmethod
    def get_store_event_fd(self) -> int: ...  # noqa: D102

    @abstractmethod
    def get_lookup_and_lock_event_fd(self) -> int: ...  # noqa: D102

    @abstractmethod
    def get_load_event_fd(self) -> int: ...  # noqa: D102

    @abstractmethod
    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int: ...  # noqa: D102

    @abstractmethod
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]: ...  # noqa: D102

    @abstractmethod
    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: dict[int, Any]) -> int: ...  # noqa: D102

    @abstractmethod
    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None: ...  # noqa: D102

    @abstractmethod
    def submit_unlock(self, keys: list[Any]) -> None: ...  # noqa: D102

    @abstractmethod
    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int: ...  # noqa: D102

    @abstractmethod
    def query_load_result(self, task_id: int) -> Bitmap | None: ...  # noqa: D102

    @abstractmethod
    def close(self) -> None: ...  # noqa: D102


class TwinWorld:
    """See `l2_kit.World`."""

    def key(self, chunk: bytes, *, model: str = "model", rank: int = 1, group: int = 0, salt: str = "") -> ObjectKey:
        """See `World.key`."""
        return ObjectKey(chunk, model, rank, group, salt)

    def memory(self, data: bytes, shape: Sequence[int], dtype: str) -> Memory:
        """See `World.memory`."""
        assert len(data) == prod(shape) * _ITEM_BYTES[dtype]
        return Memory(data, Metadata(tuple(shape), f"torch.{dtype}"))

    def layout(self, shape: Sequence[int], dtype: str) -> Layout:
        """See `World.layout`."""
        return Layout([tuple(shape)], [f"torch.{dtype}"])


@contextmanager
def installed() -> Iterator[None]:
    """While it lasts, `import lmcache` gives the stand-in, also to the adapter."""
    contents: dict[str, dict[str, Any]] = {
        "lmcache": {"__version__": VERSION},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    }
    for name in ("lmcache.v1", "lmcache.v1.distributed", "lmcache.v1.distributed.l2_adapters"):
        contents[name] = {}
    hidden = {name: module for name, module in sys.modules.items() if name == "lmcache" or name.startswith(_OURS)}
    for name in hidden:
        del sys.modules[name]
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name in contents or name.startswith(_OURS)]:
            del sys.modules[name]
        sys.modules.update(hidden)


_OURS = ("lmcache.", "kvpool.connectors.lmcache.adapter")
