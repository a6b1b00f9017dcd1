"""vLLM's KV connector: `"kv_connector":"KvpoolConnector","kv_connector_module_path":"kvpool.connectors.vllm"`; see `docs/vllm.md`.

What decides and what moves bytes needs no vLLM; the class itself, which vLLM asks this module for, is loaded when it is asked for.
"""

from typing import Any

__all__ = ["KvpoolConnector"]


def __getattr__(name: str) -> Any:
    if name == "KvpoolConnector":
        from kvpool.connectors.vllm.connector import KvpoolConnector

        return KvpoolConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
