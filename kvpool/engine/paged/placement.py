"""Which free block to take: next to the last one where possible, so that most sequences lie in one piece.

Theory. A block table may point anywhere; nothing depends on where. But what lies in one piece is read in place, and what doesn't has to
be gathered (or mapped) before attention can read it. So a sequence *claims* a span as long as it may become, the lowest one that is
free. A claim is a wish, not a reservation: others keep out of it only while there is other room. Low addresses first,
so that memory that was never needed is never touched.
"""

import numpy as np

Claim = tuple[int, int]
"""First block of a span and the one behind it."""


class FreeBlocks:
    """The free ones of blocks 0 .. `capacity`-1, and the spans that sequences hope to fill."""

    def __init__(self, capacity: int) -> None:
        self._free = np.ones(capacity, np.bool_)
        self._claims = np.zeros(capacity, np.uint16)
        self._count = capacity

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return bool(self._free[block])

    def claim(self, length: int) -> Claim | None:
        """The lowest span of `length` blocks that are free and nobody's; None if there is none. Give it back with `drop`."""
        taken = np.flatnonzero(~self._free | (self._claims > 0))
        edges = np.concatenate(([-1], taken, [len(self._free)]))
        wide = np.flatnonzero(np.diff(edges) > length)
        if not wide.size:
            return None
        start = int(edges[wide[0]]) + 1
        self._claims[start : start + length] += 1
        return start, start + length

    def drop(self, claim: Claim) -> None:
        """`claim` is nobody's any more."""
        self._claims[claim[0] : claim[1]] -= 1

    def take(self, wanted: int | None, claim: Claim | None) -> int:
        """A free block, of which there must be one: `wanted` if it is free and nobody else's, else the lowest that nobody claims."""
        if wanted is not None and wanted < len(self._free) and self._free[wanted]:
            ours = claim is not None and claim[0] <= wanted < claim[1]
            if ours or not self._claims[wanted]:
                return self._taken(wanted)
        unclaimed = self._free & (self._claims == 0)
        block = int(unclaimed.argmax())
        return self._taken(block if unclaimed[block] else int(self._free.argmax()))

    def give(self, block: int) -> None:
        """`block` is free."""
        self._free[block] = True
        self._count += 1

    def _taken(self, block: int) -> int:
        self._free[block] = False
        self._count -= 1
        return block
