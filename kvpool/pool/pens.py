"""The orders of eviction: passing blocks first, then blocks as the policy ranks them, behind all the softly pinned ones.

A *passing* block was fetched from a slower tier for one reading and hasn't shown yet that it comes back; it leaves before anything else,
so that a scan over the slower tier doesn't empty the faster one; *near* copies stand with them for good. A *softly pinned* block stands
in a pen of its own, so the policy never has to walk over it, and it costs nothing until everything else is gone. Within these two
pens the least recently used leaves first.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing

from kvpool.block import BlockKey
from kvpool.policy.eviction import EvictionPolicy, PrefixLru
from kvpool.pool.resident import Resident


class Pens:
    """Committed blocks in order of eviction; a block is in exactly one pen, as its `soft` and `passing` say."""

    __slots__ = ("passing", "policy", "softly")

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.passing = PrefixLru()
        self.softly = PrefixLru()

    def insert(self, blocks: Sequence[Resident], now_ns: int) -> None:
        """Blocks were committed, or changed pens; the first of them is the youngest there."""
        for block in reversed(blocks):  # tails first, so that heads are the younger ones
            self._of(block).inserted(block.arrival(), now_ns)

    def touch(self, block: Resident, now_ns: int, sequence: int) -> None:
        """A reader used the block for a prompt of `sequence` tokens."""
        self._of(block).touched(block.key, now_ns, sequence)

    def remove(self, block: Resident) -> None:
        """The block is gone from the index."""
        self._of(block).removed(block.key)

    def soften(self, block: Resident, soft: bool, now_ns: int) -> None:
        """Put the block into the pen where it belongs now; it enters as the youngest there."""
        if block.soft != soft:
            self.remove(block)
            block.soft = soft
            self.insert((block,), now_ns)

    def admit(self, block: Resident, now_ns: int) -> None:
        """A passing block has come back: it stays as long as the policy says. A near copy stays what it is."""
        if block.passing and not block.near:
            self.remove(block)
            block.passing = False
            self.insert((block,), now_ns)

    def victims(self) -> Generator[BlockKey, None, None]:
        """The first to leave first; as `EvictionPolicy.victims`."""
        for pen in (self.passing, self.policy, self.softly):
            with closing(pen.victims()) as victims:
                yield from victims

    def coldest(self, nbytes: int, committed: Mapping[BlockKey, Resident]) -> list[BlockKey]:
        """Blocks that would leave next to make room for `nbytes`: each victim, then its chain upwards, since that is what follows it.

        Near copies, which leave without further ado, are not among them.
        """
        chosen, left = dict[BlockKey, None](), nbytes
        with closing(self.victims()) as victims:
            for key in victims:
                block: Resident | None = committed[key]
                while block is not None and not (block.grips or block.near or block.key in chosen) and left > 0:
                    chosen[block.key] = None
                    left -= block.size
                    block = committed.get(block.parent) if block.parent is not None else None
                if left <= 0:
                    break
        return list(chosen)

    def _of(self, block: Resident) -> EvictionPolicy:
        return self.softly if block.soft else self.passing if block.passing else self.policy
