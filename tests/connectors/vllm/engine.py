"""Stand-ins for the objects of vLLM that the connector is handed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

BLOCK = 4
"""Tokens a block."""


def hashes_of(tokens: Sequence[int], size: int = BLOCK) -> list[bytes]:
    """As vLLM's, of another hash: one of each full block, of all tokens before its end."""
    return [repr(tokens[: at + size]).encode().ljust(32, b".")[-32:] for at in range(0, len(tokens) // size * size, size)]


@dataclass
class Request:
    """A request, with what the connector reads of it."""

    request_id: str
    all_token_ids: list[int]
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        return hashes_of(self.all_token_ids)


class BlockPool:
    """The engine's blocks, and who uses them."""

    def __init__(self, count: int = 32) -> None:
        self.blocks: Sequence[Any] = [SimpleNamespace(block_id=number, ref_cnt=0, is_null=number == 0) for number in range(count)]

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    @property
    def held(self) -> list[int]:
        """Blocks that somebody uses."""
        return [block.block_id for block in self.blocks if block.ref_cnt]


class Pool:
    """What the pool holds, by key."""

    def __init__(self, here: bool = True) -> None:
        self.here = here
        self.keys: set[bytes] = set()
        self.asked = 0

    def lookup(self, keys: Sequence[bytes]) -> int:
        self.asked += 1
        return next((at for at, key in enumerate(keys) if key not in self.keys), len(keys))
