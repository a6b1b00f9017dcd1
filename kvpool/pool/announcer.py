"""Who tells readers on the node's own host where blocks lie: the pool's side of it.

A *board* lets others find blocks and copy their bytes without asking the pool, and *hold* the bytes they look at. The pool never sees them
come. So it keeps an order that protects them: a block is published only when its bytes are final, and withdrawn before its bytes may be
given to anybody or copied over. A reader that came too late for the withdrawal sees it; one that came in time is seen by it.
"""

from typing import Protocol

from kvpool.block import BlockKey
from kvpool.pool.resident import Resident


class Announcer(Protocol):
    """A board as the pool needs it. Must be quick and not call back. Contract: `kvpool.testing.announcer_kit`.

    Holds are told by key: every record ever published under it counts, withdrawn ones too, until nobody holds it.
    """

    def publish(self, block: Resident) -> None:
        """The block can be read at `block.location` until `block.expires_ns`; `block.unverified`: nobody has checked its bytes yet.

        There is no record of its key at that moment. A board without room for one more leaves it out.
        """
        ...

    def verified(self, key: BlockKey) -> None:
        """The block's bytes have been checked; nothing else about its record changes. No record: nothing."""
        ...

    def withdraw(self, key: BlockKey) -> bool:
        """Nobody new finds the block; whether somebody holds it now, or one of its key that was withdrawn before. No record: False."""
        ...

    def held(self, key: BlockKey) -> bool:
        """Whether somebody holds the block's bytes, published or withdrawn. Cheap when nobody holds anything."""
        ...
