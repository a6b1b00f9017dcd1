"""SGLang's HiCache storage: `--hicache-storage-backend dynamic` with `KvpoolHiCache` of this module; see `docs/sglang.md`.

What names and moves pages needs no SGLang; the class itself, which SGLang asks this module for, is loaded when it is asked for.
"""

from typing import Any

__all__ = ["KvpoolHiCache"]


def __getattr__(name: str) -> Any:
    if name == "KvpoolHiCache":
        from kvpool.connectors.sglang.backend import KvpoolHiCache

        return KvpoolHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
