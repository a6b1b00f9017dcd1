"""A new worker's first requests find their blocks near: what was wanted lately is fetched to the pool node beside it when it joins.

Kept are the last `MAX_CHAINS` prompts that were held in the pool, newest last, each with the workers' namespace. Fetching is the
prefetcher's (`prefetch.py`), within its bound, and the blocks are held for `HOLD_S` only: near copies stay as long as they are worth it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from kvpool.block import BlockKey
from router.queue.prefetch import Prefetcher
from router.worker import Worker

MAX_CHAINS = 32
HOLD_S = 5.0


class Warmer:
    """Of one router. Lives on one event loop."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        self._chains: OrderedDict[tuple[bytes, BlockKey], tuple[BlockKey, ...]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self.warmed = 0
        """Workers for which something was fetched."""

    def wanted(self, worker: Worker, keys: Sequence[BlockKey]) -> None:
        """A request of the worker's namespace used these leading blocks of the pool."""
        if keys:
            name = worker.root, keys[0]
            before = self._chains.pop(name, ())
            self._chains[name] = tuple(keys) if len(keys) >= len(before) else before
            if len(self._chains) > MAX_CHAINS:
                self._chains.popitem(last=False)

    def joined(self, worker: Worker) -> None:
        """Fetch for a worker that has just come."""
        chains = [keys for (root, _), keys in reversed(self._chains.items()) if root == worker.root]
        if chains and worker.host:
            self.warmed += 1
            task = asyncio.get_running_loop().create_task(self._warm(worker, chains))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop fetching."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _warm(self, worker: Worker, chains: Sequence[Sequence[BlockKey]]) -> None:
        """One after the other, the newest first."""
        for keys in chains:
            with self._prefetcher.hold(keys, 0, block_tokens=worker.block_tokens, host=worker.host):
                await asyncio.sleep(HOLD_S)
