"""Hot extents: what is read very often here gets a copy on the next node in order, so that it survives this one.

Reads are counted by the heads of extents, on the nodes that are to hold them (`policy/hot.py`). An extent that reaches `hot_reads` in a
minute is pushed, as near copies, to the node that would be its next target: should one of its targets die, that node is one, has it, and
adopts it. Nobody relies on these copies, so nobody repairs them; an extent that stays hot is offered again every minute.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from kvpool.block import BlockKey
from kvpool.client.links import Links
from kvpool.clock import Clock
from kvpool.errors import ClosedError, RemoteError
from kvpool.node.inventory import Inventory
from kvpool.node.pushing import Pusher
from kvpool.policy.hot import HotReads
from kvpool.policy.placement import blocks_per_extent, place
from kvpool.pool import PoolState

log = logging.getLogger(__name__)

_MAX_WAITING = 256
_ASK_S = 2.0


class Heat:
    """Counts reads of node `me` and spreads what is hot. On the event loop."""

    def __init__(self, me: str, pool: PoolState, inventory: Inventory, pusher: Pusher, clock: Clock, links: Links) -> None:
        self._me = me
        self._pool = pool
        self._inventory = inventory
        self._pusher = pusher
        self._clock = clock
        self._links = links
        self._reads = HotReads()
        self._waiting: deque[tuple[BlockKey, list[BlockKey]]] = deque(maxlen=_MAX_WAITING)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.counters = dict.fromkeys(("hot_extents", "hot_pushed"), 0)

    def start(self) -> None:
        """Begin to spread."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; a batch that is under way is waited for."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def read(self, keys: Sequence[BlockKey]) -> None:
        """A reader got these blocks, in the order of their chain. It is on the way of every read, so only possible heads are looked at."""
        config = self._links.config
        if not config.hot_reads or not keys:
            return
        now_ns, extent_tokens = self._clock.now_ns(), config.extent_tokens
        start, step = self._stride(keys, extent_tokens)
        for key in keys[start::step]:
            link = self._pool.link(key)
            if link is None or link[2] or self._inventory.head(key, extent_tokens) != key:
                continue  # gone meanwhile, only a near copy, or not the first of an extent
            if self._reads.read(key, config.hot_reads, now_ns):
                self.counters["hot_extents"] += 1
                self._waiting.append((key, [one for one in keys if self._inventory.head(one, extent_tokens) == key]))
                self._wake.set()

    def _stride(self, keys: Sequence[BlockKey], extent_tokens: int) -> tuple[int, int]:
        """Where in `keys` the first head may be, and how many blocks from one to the next, if they follow each other in whole extents."""
        if len(keys) < 2:
            return 0, 1
        first, second = self._pool.link(keys[0]), self._pool.link(keys[1])
        tokens = second[1] - first[1] if first is not None and second is not None else 0
        if first is None or tokens <= 0:
            return 0, 1
        step = blocks_per_extent(tokens, extent_tokens)
        return -(first[1] // tokens) % step, step

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                head, keys = self._waiting.popleft()
                try:
                    await self._spread(head, keys)
                except (RemoteError, ClosedError) as error:
                    log.warning("a hot extent of %d blocks got no further copy: %s", len(keys), error)
                except Exception:
                    log.exception("spreading a hot extent failed")

    async def _spread(self, head: BlockKey, keys: Sequence[BlockKey]) -> None:
        """Put near copies onto the node that is next in order."""
        refs = {ref.node_id: ref for ref in self._links.nodes()}
        nodes, config = [ref.placed for ref in refs.values()], self._links.config
        fingerprint = self._inventory.fingerprint(head)
        copies = config.copies if fingerprint is None else config.copies_of(fingerprint)
        targets = place([head], 1, nodes, copies)[0].targets
        spare = [node for node in place([head], 1, nodes, copies + 1)[0].targets if node not in targets]
        if self._me not in targets or not spare or self._links.resting(refs[spare[0]]):
            return
        link = await self._links.link(refs[spare[0]], _ASK_S)
        present = await link.rpc.lookup(keys, _ASK_S)
        lacking = [key for key, there in zip(keys, present, strict=True) if not there]
        if lacking:
            self.counters["hot_pushed"] += len(await self._pusher.push(refs[spare[0]], lacking, near=True))
