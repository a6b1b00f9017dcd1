"""Who tells readers on the node's own host where blocks lie: the pool's side of it.

A *board* lets others find blocks and copy their bytes without asking the pool, and *hold* the bytes they look at. The pool never sees them
come. So it keeps an order that protects them: a block is published only when its bytes are final, and withdrawn before its bytes may be
given to anybody or copied over. A reader that came too late for the withdrawal sees it; one that came in time is seen by it.
"""

from collections.abc import Sequence
from typing import Protocol

from kvpool.block import BlockKey
from kvpool.pool.resident import Resident


class Announcer(Protocol):
    """A board as the pool needs it. Must be quick and not call back. Contract: `kvpool.testing.announcer_kit`.

    Holds are told by key: every record ever published under it counts, withdrawn ones too, until nobody holds it.
    """

    def publish(self, blocks: Sequence[Resident]) -> None:
        """Each can be read at its `location` until its `expires_ns`; `unverified`: nobody has checked its bytes yet.

        There is no record of its key at that moment. A board without room for one more leaves it out.
        """
        ...

    def verified(self, key: BlockKey) -> None:
        """The block's bytes have been checked; nothing else about its record changes. No record: nothing."""
        ...

    def withdraw(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        """Nobody new finds these blocks, if they have records; which of them are `held` all the same."""
        ...

    def held(self, key: BlockKey) -> bool:
        """Whether somebody holds the block's bytes, published or withdrawn. Cheap when nobody holds anything."""
        ...

    def watched(self) -> bool:
        """Whether anybody holds anything: if not, no block is held."""
        ...
