"""Checks what came over a wire or from another tier once, so that readers of the board needn't do it again and again.

Theory. Who reads such a block from the board hashes it each time, for it can tell nobody what it found. So the node looks at those that
were used a second time: some at once, held in place meanwhile, in a thread of its own, and not faster than `_BATCH_BYTES` every `_PAUSE_S`,
which is a few percent of a core. A block that is right is verified from then on; one that isn't is examined once more, and dropped.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kvpool.block import BlockKey, check_frame
from kvpool.clock import Clock
from kvpool.errors import FrameError
from kvpool.pool import Location, PoolState
from kvpool.tier import Arena
from kvpool.units import MIB, SECOND

log = logging.getLogger(__name__)

OWNER: Final = "verify"
_BATCH_BYTES: Final = 16 * MIB
_PAUSE_S: Final = 0.1
_LEASE_NS: Final = 30 * SECOND
_MAX_WANTED: Final = 4096

Placed = list[tuple[BlockKey, Location]]


class Verifier:
    """Of one node; `examine` drops a block that is damaged. All calls on the event loop. `checked`: blocks found right so far."""

    def __init__(self, pool: PoolState, arena: Arena, clock: Clock, examine: Callable[[BlockKey], None]) -> None:
        self.checked = 0
        self._pool = pool
        self._arena = arena
        self._clock = clock
        self._examine = examine
        self._wanted: dict[BlockKey, None] = {}
        self._thread = ThreadPoolExecutor(1, "kvpool-verify")
        self._task: asyncio.Task[None] | None = None

    def used(self, keys: Sequence[BlockKey]) -> None:
        """Readers of the board got these blocks. What there is no room to remember is met again when it is used again."""
        if len(self._wanted) < _MAX_WANTED:
            self._wanted.update(dict.fromkeys(self._pool.doubtful(keys)))
        if self._wanted and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Look at no more; the thread has ended then."""
        self._wanted.clear()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self) -> None:
        try:
            while self._wanted:
                await self._step()
                await asyncio.sleep(_PAUSE_S)
        except Exception:
            log.exception("checking blocks failed")

    async def _step(self) -> None:
        """One batch, a single block if that is larger."""
        chosen: list[BlockKey] = []
        nbytes = 0
        for key in self._pool.doubtful(list(self._wanted)):
            place = self._pool.locate(key)
            nbytes += 0 if place is None else place.length
            if chosen and nbytes > _BATCH_BYTES:
                break
            chosen.append(key)
        else:
            self._wanted.clear()
        for key in chosen:
            self._wanted.pop(key, None)
        held = self._pool.hold(chosen, owner=OWNER, lease_ns=_LEASE_NS, now_ns=self._clock.now_ns())
        placed = [(key, place) for key, place in zip(chosen, held.found, strict=True) if place is not None]
        if not placed:
            return
        try:
            right = await asyncio.get_running_loop().run_in_executor(self._thread, self._check, placed)
        finally:
            in_place = self._pool.release(held.lease_id, self._clock.now_ns())
        if in_place:
            self.checked += self._pool.verified([one for one, ok in zip(placed, right, strict=True) if ok])
        for (key, _), ok in zip(placed, right, strict=True):
            if not ok:
                self._examine(key)

    def _check(self, placed: Placed) -> list[bool]:
        """In the thread: which frames are what they should be."""
        return [self._is_right(key, place) for key, place in placed]

    def _is_right(self, key: BlockKey, place: Location) -> bool:
        try:
            check_frame(self._arena.view(*place), key)
        except FrameError:
            return False
        return True
