"""The engine's view of the pool: load and store runs of blocks of one chain.

A *chain* is all block keys of a token sequence from its first block on (`kvpool.block.chain_keys`), because where a block
lives follows from the head of its extent, which may lie before the blocks that are moved. `first` is the index of the first
block a call is about; `counts[i]` is the number of valid tokens of block `first + i` (only the last may be partial).

Remote trouble never raises here: a miss, an error or a passed deadline ends the leading run, and the engine computes the rest.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.block import BlockKey

Payload = npt.NDArray[np.uint8]
Sink = Callable[[int, Payload], None]
"""Called as sink(i, payload) with the validated payload of chain[i]; the payload is valid only during the call."""
Fill = Callable[[int, Payload], None]
"""Called as fill(i, payload) to write the payload of chain[i] in place."""


class BlockStore(Protocol):
    """A place that keeps blocks. `deadline_ns` is monotonic time. Sinks and fills are called from another thread, in order."""

    async def load(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Sink, *, deadline_ns: int) -> int:
        """Deliver the leading run of chain[first : first + len(counts)]; how many blocks were delivered."""
        ...

    async def store(
        self,
        chain: Sequence[BlockKey],
        first: int,
        counts: Sequence[int],
        fill: Fill,
        *,
        deadline_ns: int,
        ttl_ns: int = 0,
    ) -> int:
        """Make chain[first : first + len(counts)] present; how many of them the store now holds."""
        ...

    def reaches(self) -> dict[str, str]:
        """How each node's bytes are reached right now: node id -> reach name."""
        ...
