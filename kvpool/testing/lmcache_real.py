"""LMCache's own keys and memory objects for `l2_kit.py`, by an interpreter that has LMCache.

`python -m kvpool.testing.lmcache_real POOL` runs the kit with LMCache's plugin loader; no test runner is needed.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig, _create_plugin_adapter
from lmcache.v1.memory_management import MemoryObjMetadata, TensorMemoryObj

from kvpool.testing.l2_kit import CHECKS


class RealWorld:
    """See `l2_kit.World`."""

    def key(self, chunk: bytes, *, model: str = "model", rank: int = 1, group: int = 0, salt: str = "") -> Any:
        """See `World.key`."""
        return ObjectKey(chunk, model, rank, group, salt)

    def memory(self, data: bytes, shape: Sequence[int], dtype: str) -> Any:
        """See `World.memory`. Behind it stand bytes that aren't its own, as in LMCache's arena."""
        raw = torch.zeros(len(data) + 64, dtype=torch.uint8)
        raw[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        size = torch.Size(shape)
        kind = getattr(torch, dtype)
        assert size.numel() * kind.itemsize == len(data)
        metadata = MemoryObjMetadata(shape=size, dtype=kind, address=0, phy_size=len(raw), ref_count=1, shapes=[size], dtypes=[kind])
        return TensorMemoryObj(raw, metadata, parent_allocator=None)

    def layout(self, shape: Sequence[int], dtype: str) -> Any:
        """See `World.layout`."""
        return MemoryLayoutDesc(shapes=[torch.Size(shape)], dtypes=[getattr(torch, dtype)])


def opened(pool: str, **more: Any) -> Any:
    """An adapter, made as LMCache makes it of `--l2-adapter`."""
    spec = {"type": "plugin", "module_path": "kvpool.connectors.lmcache", "class_name": "KvpoolL2"}
    return _create_plugin_adapter(PluginL2AdapterConfig.from_dict({**spec, "adapter_params": {"pool": pool, **more}}))


def main(pool: str) -> None:
    """Run every check; prints its name when it holds."""
    for check in CHECKS:
        adapters: list[Any] = []

        def open_(adapters: list[Any] = adapters, **more: Any) -> Any:
            adapters.append(opened(pool, **more))
            return adapters[-1]

        check(RealWorld(), open_)
        for adapter in adapters:
            adapter.close()
        print(check.__name__, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
