"""Saved blocks as vLLM's own KV events, which go out through the engine's publisher beside those of its own cache."""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvpool.connectors.vllm.requests import Story

MEDIUM = "STORAGE"
LOCALITY = "REMOTE"
OWNERSHIP = "kvpool"


def stored_events(stories: Iterable[Story], block_tokens: int) -> list[Any]:
    """One event for each run of blocks. Their hashes are spelled as the engine spells its own: a mixed batch is dropped by some readers."""
    return [
        BlockStored(
            block_hashes=[maybe_convert_block_hash(one) for one in story.hashes],
            parent_block_hash=None if story.parent is None else maybe_convert_block_hash(story.parent),
            token_ids=story.tokens,
            block_size=block_tokens,
            lora_id=None if story.lora is None else story.lora.adapter_id,
            medium=MEDIUM,
            lora_name=None if story.lora is None else story.lora.name,
            group_idx=0,
            locality=LOCALITY,
            ownership=OWNERSHIP,
        )
        for story in stories
    ]
