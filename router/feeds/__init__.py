"""What fills the prefix index: events of pool nodes and workers, and those of stock vLLM engines (docs/prefix-index.md)."""

from router.feeds.members import Feeds, MemberFeeds, View, dial
from router.feeds.vllm import VllmFeed
from router.feeds.vllm_state import VllmCounts

__all__ = ["Feeds", "MemberFeeds", "View", "VllmCounts", "VllmFeed", "dial"]
