"""What a node tells of the blocks it holds, as plain values: batches of changes, and pieces of a snapshot.

Theory. A node numbers the changes of what it holds, from 1 in each of its lives (incarnations). A batch takes a consumer from the state
after change `after` to the state after change `sequence`: of each block that changed in between it says how it is now, once. A batch with
`after == sequence` changes nothing and says that nothing has changed (a keep-alive).

A snapshot comes in parts, numbered from 1, among the batches of changes. A part says which blocks a piece of the node's table held at
`sequence`, and the batches before it have brought the consumer to exactly there. So with the last part the consumer has the node's state
at that one sequence number, and nothing had to stand still meanwhile. Part 1 begins anew: what the consumer had counts no more.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvpool.block import BlockKey

DRAM, BESIDE, BELOW = 1, 2, 3
"""The tier of a stored block, as Lookup says it: the arena, the faster memory beside it (GPU), the slower tier below (SSD, shared).
A block that several tiers hold is said to be on the first of these."""

TIER_NAMES: Final = {DRAM: "dram", BESIDE: "gpu", BELOW: "below"}

MAX_BATCH: Final = 4096
"""Blocks in one batch or part: at most 300 KB on the wire, and a few milliseconds of work on either side."""
KEEPALIVE_S: Final = 1.0
"""A node with nothing to tell says so this often."""
MAX_WATCHERS: Final = 64
"""Consumers of one node at the same time."""

Stored = tuple[BlockKey, BlockKey | None, int, int]
"""(key, parent or None for the first block of a chain, tokens before the block, tier). A tuple: there is one a block."""


class Pressure(NamedTuple):
    """How scarce memory is at who tells: what may come in before something has to leave, and what each token more costs then.

    `free`: tokens in a worker, bytes in a node. `price`: in tokens to compute again (`policy/price.py`). 0 from one that doesn't say.
    """

    free: int = 0
    price: float = 0.0


NO_PRESSURE: Final = Pressure()


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """A step from `after` to `sequence` in the life `incarnation` of a node. `stored` and `removed` name each block at most once, together.

    `part`: 0 for changes, else the number of this part of a snapshot, which has `after == sequence` and no `removed`; `last`: the
    snapshot is complete with it. `pressure`: of the moment in which it was sent.
    """

    incarnation: int
    after: int
    sequence: int
    stored: tuple[Stored, ...] = ()
    removed: tuple[BlockKey, ...] = ()
    part: int = 0
    last: bool = False
    pressure: Pressure = NO_PRESSURE

    def __post_init__(self) -> None:
        if not 0 <= self.after <= self.sequence or (self.part and (self.removed or self.after != self.sequence)):
            raise ValueError("a batch of events goes forward, and a part of a snapshot stands still")
