"""Who holds how much of a prompt: hints for a router, kept small and answered fast (docs/prefix-index.md)."""

from kvpool.policy.prefix.index import HOLDER_KEYS, PrefixIndex
from kvpool.policy.prefix.match import Match, Reach

__all__ = ["HOLDER_KEYS", "Match", "PrefixIndex", "Reach"]
