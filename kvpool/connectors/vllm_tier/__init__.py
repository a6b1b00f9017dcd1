"""A secondary tier for vLLM's TieringOffloadingSpec: `{"type":"KvpoolTier","module_path":"kvpool.connectors.vllm_tier",...}`.

See `docs/vllm-tier.md`. What moves the bytes needs no vLLM; the class itself, which vLLM asks this module for, is loaded when it is asked
for.
"""

from typing import Any

__all__ = ["KvpoolTier"]


def __getattr__(name: str) -> Any:
    if name == "KvpoolTier":
        from kvpool.connectors.vllm_tier.tier import KvpoolTier

        return KvpoolTier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
