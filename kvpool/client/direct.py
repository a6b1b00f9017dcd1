"""Reading by key, without a lease: from a board of this host, or from a node that answers keys over TCP.

Both take what is in memory now, and whatever they don't deliver is left to `reading.py`. A node on another host is asked directly for the
blocks that it would be asked for first anyway, all nodes at once, with one message each. What came over a wire is checked in full (header,
key, both checksums) before anybody sees it. A block that fails a check counts as not there.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from kvpool.block import BlockKey
from kvpool.client.asking import Holder
from kvpool.client.core import Core
from kvpool.client.here import Limits, Sink
from kvpool.client.links import NodeLink
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import SLOWEST_BYTES_PER_S, STALL_NS
from kvpool.errors import ClosedError, ConfigError, DeadlineError, RemoteError, UnavailableError
from kvpool.transport.reach import Bytes
from kvpool.units import KIB, SECOND

log = logging.getLogger(__name__)

T = TypeVar("T")

_INLINE_BYTES = 256 * KIB
"""A copy so short is made on the event loop: a thread would cost more."""


@runtime_checkable
class KeyedReach(Protocol):
    """A reach that finds blocks itself (`TcpReach` is one). Both raise as `Reach.read`."""

    def probe(self, keys: Sequence[BlockKey], deadline_ns: int) -> bytes:
        """A byte a key, 1 where it can be read now."""
        ...

    def get(self, wants: Sequence[tuple[BlockKey, int, Bytes, Bytes]], deadline_ns: int) -> list[bool]:
        """Fill header and payload targets of (key, frame length, header, payload); which came, unchecked."""
        ...


_Targets = Sequence[Bytes] | Mapping[int, Bytes]
"""Where the payload of the block at a position goes."""


class _Asked(NamedTuple):
    """One node's part: the blocks at these positions."""

    link: NodeLink
    reach: KeyedReach
    positions: list[int]


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
        self._holders = holders
        self._refs = refs
        self._keys = keys
        self._counts = counts
        self._deadline_ns = deadline_ns
        self._known: dict[int, NodeLink | None] = {}

    async def lookup(self) -> list[bool]:
        """Which blocks are there."""
        core = self._core
        present = core.here.present(self._keys) if core.links.locals else [False] * len(self._keys)
        asked = self._asked([j for j, there in enumerate(present) if not there])
        answers = await asyncio.gather(*(self._ask(one, partial(self._probe, one)) for one in asked))
        for one, answer in zip(asked, answers, strict=True):
            for j, there in zip(one.positions, answer or bytes(len(one.positions)), strict=True):
                present[j] = bool(there)
        return present

    async def fetch(self, targets: Sequence[Bytes]) -> bytearray:
        """Fill `targets`, uint8 `[payload bytes]` each; a byte a block, 1 where its payload has come."""
        core, keys, counts = self._core, self._keys, self._counts
        got = bytearray(len(keys))
        if core.links.locals:
            if sum(target.size for target in targets) <= _INLINE_BYTES:
                got = core.here.read(keys, counts, targets, Limits(self._deadline_ns))
            else:
                got = await core.in_thread(lambda limits: core.here.read(keys, counts, targets, limits), self._deadline_ns)
        await self._fetch_far([j for j, came in enumerate(got) if not came], targets, got)
        return got

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
        while end < len(sizes) and self._link(end) is not None and (end == start or nbytes + sizes[end] <= core.stages.nbytes):
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

    async def _fetch_far(self, positions: Sequence[int], targets: _Targets, got: bytearray) -> None:
        """Fill the targets at these positions from nodes elsewhere, all at once, and note in `got` what came and is sound."""
        asked = self._asked(positions)
        if asked:
            answers = await asyncio.gather(*(self._ask(one, partial(self._get, one, targets)) for one in asked))
            came = [j for answer in answers for j in answer or ()]
            for j in came:
                got[j] = 1
            self._core.direct.add("hits", len(came))

    def _probe(self, one: _Asked, limits: Limits) -> bytes:
        """In a thread: a byte for each of one node's blocks."""
        return one.reach.probe([self._keys[j] for j in one.positions], limits.deadline_ns)

    def _get(self, one: _Asked, targets: _Targets, limits: Limits) -> list[int]:
        """In a thread: the positions whose payloads have come from one node, and are what they should be."""
        glances = self._core.here.glances
        headers = np.empty((len(one.positions), self._core.framer.header_bytes), np.uint8)
        wants = [(self._keys[j], glances[self._counts[j]].frame_bytes, headers[k], targets[j]) for k, j in enumerate(one.positions)]
        came = one.reach.get(wants, limits.deadline_ns)
        return [
            j
            for k, (j, there) in enumerate(zip(one.positions, came, strict=True))
            if there and glances[self._counts[j]].sound(headers[k].tobytes(), self._keys[j], targets[j])
        ]

    async def _ask(self, one: _Asked, work: Callable[[Limits], T]) -> T | None:
        """What `work` gets from a node in a worker thread; None when it fails, and then its connection is judged."""
        links, ref = self._core.links, one.link.node
        deadline_ns = self._deadline_ns
        nbytes = sum(self._core.framer.frame_bytes(self._counts[j]) for j in one.positions)
        fair_ns = time.monotonic_ns() + STALL_NS + nbytes * SECOND // SLOWEST_BYTES_PER_S
        try:
            result = await self._core.in_thread(work, min(deadline_ns, fair_ns))
        except ConfigError as error:
            log.warning("node %s can't be asked by key: %s", ref.node_id[:8], error)
        except (RemoteError, ClosedError) as error:
            log.warning("node %s, asked by key: %s", ref.node_id[:8], error)
            if isinstance(error, DeadlineError) and deadline_ns < fair_ns:
                links.late(ref)
            elif not (isinstance(error, ClosedError) and self._core.closed):
                reach = one.link.reach.name if isinstance(error, UnavailableError) else None
                await links.failed(ref, "data", reach=reach, link=one.link)
        else:
            links.health.well(ref, "data")
            return result
        return None

    def _asked(self, positions: Iterable[int]) -> list[_Asked]:
        """Who is asked for which of these blocks."""
        groups: dict[str, _Asked] = {}
        for j in positions:
            link = self._link(j)
            if link is not None and isinstance(link.reach, KeyedReach):
                groups.setdefault(link.node.node_id, _Asked(link, link.reach, [])).positions.append(j)
        return list(groups.values())

    def _link(self, j: int) -> NodeLink | None:
        """The open connection to the first that is to be asked for block j, if it answers keys. Blocks of an extent share their holders."""
        holders = self._holders[j]
        if id(holders) not in self._known:
            self._known[id(holders)] = self._link_of(holders)
        return self._known[id(holders)]

    def _link_of(self, holders: Sequence[Holder]) -> NodeLink | None:
        links = self._core.links
        for node_id, fetch_from in holders:
            ref = self._refs[node_id]
            if links.resting(ref) or links.slow(ref):
                continue
            link = links.opened(ref)
            return link if link is not None and not fetch_from and isinstance(link.reach, KeyedReach) else None
        return None
