"""What many sequences of one worker lack at once is loaded once, and computed once: the others wait for it and share the blocks.

Theory. Twelve requests behind one prefix that is in the pool are one load, not twelve that slow each other down until all are too late. So
before a sequence loads or computes anything it looks who brings its first missing block already (`coming.py`), waits, and takes the
blocks into its table as they get their names. A load it waits for is judged as if it were its own (`patience.py`): if it comes slower than
the rest could be computed, this sequence takes the rest over. A computation is waited for as long as it takes, since one's own would
only stand behind it on the same thread.

A load that others wait for outlasts the sequence that began it (`gather.py`); when whoever computes a block gives way, fails or hangs up,
the first that waited for it brings it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from kvpool.block import BlockKey
from kvpool.engine.coming import Coming, Part
from kvpool.engine.paged.blocks import BlockManager
from kvpool.engine.patience import Patience
from kvpool.units import MS

LOOK_NS = 20 * MS
"""How often a wait is judged when nothing moves."""


class Sharing:
    """Who waits for whom in one engine. Lives on one event loop."""

    def __init__(self, manager: BlockManager, freed: Callable[[], None]) -> None:
        """`freed` is called when blocks that a sequence had for itself are free again."""
        self._manager = manager
        self._freed = freed
        self._coming = Coming()
        self.waiting = 0
        """Sequences that wait for another's blocks now."""
        self._moved = asyncio.Event()

    def __len__(self) -> int:
        """Blocks that somebody brings."""
        return len(self._coming)

    async def follow(self, part: Part, keys: Sequence[BlockKey], patience: Callable[[int], Patience], deadline_ns: int) -> bool:
        """Take full blocks of `keys` into the table of `part` as others bring them; then claim what is left.

        `patience`: for a load of all blocks from the given one on that begins now. False when what is left isn't worth a load any more,
        because one was waited for too long, or because `deadline_ns` has passed.
        """
        work, size = part.work, self._manager.block_tokens
        judged: Part | None = None
        while True:
            if self._manager.adopt(work.table, keys[: work.usable // size]):
                self._freed()
            at = work.table.tokens // size
            other = self._coming.claim(part, keys[at:])
            if other is None or (at + 1) * size > work.usable:
                return True
            if other.loading and other is not judged:
                judged, first, limit = other, at, patience(at)
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns or (other is judged and other.loading and limit.lost(at - first, now_ns)):
                self._coming.take(part, keys[at:])
                return False
            with other.awaited():
                await self._until_moved()

    def moved(self) -> None:
        """Blocks have got names, or somebody brings them no more: who waits looks again."""
        self._moved.set()
        self._moved = asyncio.Event()

    def end(self, part: Part) -> None:
        """Its sequence brings nothing more; a load that others wait for goes on. Again: nothing."""
        part.gone = True
        self._settle(part)

    def loaded(self, part: Part) -> None:
        """Its load has ended; what that didn't bring is computed, if the sequence is still there."""
        part.loading = False
        self._settle(part)

    def _settle(self, part: Part) -> None:
        if part.gone and not part.loading:
            self._coming.end(part)
        self.moved()

    async def _until_moved(self) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(LOOK_NS / 1e9):
                await self._moved.wait()
        except TimeoutError:
            return
        finally:
            self.waiting -= 1
