"""kvpool: a disaggregated, distributed KV cache service for LLM inference.

    import kvpool

    with kvpool.connect("redis://127.0.0.1:6379/0", namespace=namespace) as pool:
        pool.put(tokens, blocks)
        got = pool.get(tokens)

The names below are loaded when they are first used, so that importing one room does not import all.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpool.block import Geometry, LayerSpec, Namespace
    from kvpool.client import AsyncClient, Client, Retention, connect, connect_async
    from kvpool.wire.credentials import Security

_HOMES = {
    "AsyncClient": "kvpool.client",
    "Client": "kvpool.client",
    "Geometry": "kvpool.block",
    "LayerSpec": "kvpool.block",
    "Namespace": "kvpool.block",
    "Retention": "kvpool.client",
    "Security": "kvpool.wire.credentials",
    "connect": "kvpool.client",
    "connect_async": "kvpool.client",
}

__all__ = ["AsyncClient", "Client", "Geometry", "LayerSpec", "Namespace", "Retention", "Security", "connect", "connect_async"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
