"""The pool as LMCache's L2: a plugin, `"module_path": "kvpool.connectors.lmcache", "class_name": "KvpoolL2"` (docs/lmcache.md).

The adapter is loaded when LMCache asks for it: it needs LMCache, the rest of this room doesn't.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "KvpoolL2":
        from kvpool.connectors.lmcache.adapter import KvpoolL2

        return KvpoolL2
    raise AttributeError(f"module {__name__} has no attribute {name}")
