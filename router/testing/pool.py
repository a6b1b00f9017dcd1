"""A pool that holds what a test says it holds."""

from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.errors import UnavailableError


class ScriptedPool:
    """A `PoolProbe` with `blocks` leading blocks of every chain."""

    def __init__(self, blocks: int = 0) -> None:
        self.blocks = blocks
        self.down = False
        self.asked = 0

    async def longest_prefix(self, keys: Sequence[BlockKey], block_tokens: int, timeout_s: float) -> int:
        """See `PoolProbe`."""
        self.asked += 1
        if self.down:
            raise UnavailableError("the pool is down")
        return min(self.blocks, len(keys))

    async def close(self) -> None:
        """See `PoolProbe`."""
