"""A front door for clients of Redis: values by name in the pool of this node (docs/resp.md)."""

from kvpool.node.resp.server import RespLimits, RespServer
from kvpool.node.resp.store import ValueStore

__all__ = ["RespLimits", "RespServer", "ValueStore"]
