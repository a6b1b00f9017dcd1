"""Reading by key, without a lease: from a board of this host, or from a node that answers keys over TCP.

Both take what is in memory now, and whatever they don't deliver is left to `reading.py`. Nodes on other hosts (`keyed.py`) are asked all at
once, with one message each.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from kvpool.block import BlockKey
from kvpool.client.asking import Holder
from kvpool.client.core import Core
from kvpool.client.here import Limits, Sink
from kvpool.client.keyed import Asked, Keyed, Targets, blame
from kvpool.client.sources import NodeRef
from kvpool.errors import ClosedError, ConfigError, RemoteError
from kvpool.transport.reach import Bytes
from kvpool.units import KIB

T = TypeVar("T")

_INLINE_BYTES = 256 * KIB
"""A copy so short is made on the event loop: a thread would cost more."""


class Direct:
    """The direct half of one call for `keys`, blocks of `counts` tokens each; `holders[j]` is whom to ask for block j, in order."""

    def __init__(
        self,
        core: Core,
        holders: Sequence[Sequence[Holder]],
        refs: Mapping[str, NodeRef],
        keys: Sequence[BlockKey],
        counts: Sequence[int],
        deadline_ns: int,
    ) -> None:
        self._core = core
        self._keyed = Keyed(core, holders, refs, keys, counts)
        self._keys = keys
        self._counts = counts
        self._deadline_ns = deadline_ns

    async def lookup(self, present: list[bool] | None = None) -> list[bool]:
        """Which blocks are there. `present`: those that are known to be."""
        core = self._core
        if present is None:
            present = core.here.present(self._keys) if core.links.locals else [False] * len(self._keys)
        asked = self._keyed.asked([j for j, there in enumerate(present) if not there])
        answers = await asyncio.gather(*(self._ask(one, self._keyed.probe) for one in asked))
        for one, answer in zip(asked, answers, strict=True):
            for j, there in zip(one.positions, answer or bytes(len(one.positions)), strict=True):
                present[j] = bool(there)
        return present

    async def fetch(self, targets: Sequence[Bytes], got: bytearray | None = None) -> bytearray:
        """Fill `targets`, uint8 `[payload bytes]` each; a byte a block, 1 where its payload has come. `got`: those that have already."""
        if got is None:
            got = await self._fetch_near(targets) if self._core.links.locals else bytearray(len(self._keys))
        await self._fetch_far([j for j, came in enumerate(got) if not came], targets, got)
        return got

    async def _fetch_near(self, targets: Sequence[Bytes]) -> bytearray:
        core, keys, counts = self._core, self._keys, self._counts
        if sum(target.size for target in targets) <= _INLINE_BYTES:
            return core.here.read(keys, counts, targets, Limits(self._deadline_ns))
        return await core.in_thread(lambda limits: core.here.read(keys, counts, targets, limits), self._deadline_ns)

    async def deliver(self, sink: Sink) -> int:
        """Call `sink(j, payload)` in a worker thread for the leading run; how many blocks were delivered."""
        core, keys, counts, done = self._core, self._keys, self._counts, 0
        while done < len(keys):
            start, came = done, 0
            if core.links.locals:

                def shifted(j: int, payload: Bytes, start: int = start) -> None:
                    sink(start + j, payload)

                def near(limits: Limits, start: int = start, sink: Sink = shifted) -> int:
                    return core.here.deliver(keys[start:], counts[start:], sink, limits)

                came = await core.in_thread(near, self._deadline_ns)
            if start + came < len(keys):
                came += await self._deliver_far(start + came, sink)
            if not came:
                break
            done += came
        return done

    async def _deliver_far(self, start: int, sink: Sink) -> int:
        """The next window of blocks of nodes elsewhere, through a staging buffer."""
        core, end, nbytes = self._core, start, 0
        sizes = [core.framer.geometry.payload_bytes(n) for n in self._counts]
        while end < len(sizes) and self._keyed.answers(end) and (end == start or nbytes + sizes[end] <= core.stages.nbytes):
            nbytes += sizes[end]
            end += 1
        if end == start:
            return 0
        with core.stages.take() as buffer:
            ends = np.cumsum(sizes[start:end]).tolist()
            targets = {start + k: buffer[stop - size : stop] for k, (stop, size) in enumerate(zip(ends, sizes[start:end], strict=True))}
            got = bytearray(end)
            await self._fetch_far(list(range(start, end)), targets, got)

            def hand_on(limits: Limits) -> int:
                for j in range(start, end):
                    if not got[j] or limits.over():
                        return j - start
                    sink(j, targets[j])
                return end - start

            return await core.in_thread(hand_on, self._deadline_ns) if got[start] else 0

    async def _fetch_far(self, positions: Sequence[int], targets: Targets, got: bytearray) -> None:
        """Fill the targets at these positions from nodes elsewhere, all at once, and note in `got` what came and is sound."""
        asked = self._keyed.asked(positions)
        if asked:
            get = partial(self._keyed.get, targets=targets)
            answers = await asyncio.gather(*(self._ask(one, lambda one, until: get(one, deadline_ns=until)) for one in asked))
            came = [j for answer in answers for j in answer or ()]
            for j in came:
                got[j] = 1
            self._core.direct.add("hits", len(came))

    async def _ask(self, one: Asked, work: Callable[[Asked, int], T]) -> T | None:
        """What `work` gets from a node in a worker thread; None when it fails, and then its connection is judged."""
        core, deadline_ns = self._core, self._deadline_ns
        try:
            result = await core.in_thread(lambda limits: work(one, limits.deadline_ns), min(deadline_ns, one.fair_ns))
        except (RemoteError, ClosedError, ConfigError) as error:
            await blame(core, one, error, deadline_ns)
            return None
        core.links.health.well(one.link.node, "data")
        return result
