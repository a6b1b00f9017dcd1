"""Nodes that answer keys over TCP: who of them is asked for which blocks, and the blocking calls that ask one.

A node is asked for the blocks that it would be asked for first anyway, over the connection that is open. What came over a wire is checked
in full (header, key, both checksums) before anybody sees it; a block that fails counts as not there. `direct.py` makes these calls from
an event loop, `elsewhere.py` in the caller's own thread.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, cast, runtime_checkable

import numpy as np

from kvpool.block import BlockKey
from kvpool.client.asking import Holder
from kvpool.client.core import Core
from kvpool.client.links import NodeLink
from kvpool.client.plan import alike
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import SLOWEST_BYTES_PER_S, STALL_NS
from kvpool.errors import ClosedError, ConfigError, DeadlineError, KvpoolError, UnavailableError
from kvpool.transport.reach import Bytes, Reach
from kvpool.units import SECOND

log = logging.getLogger(__name__)


@runtime_checkable
class KeyedReach(Protocol):
    """A reach that finds blocks itself (`TcpReach` is one). Both raise as `Reach.read`."""

    def probe(self, keys: Sequence[BlockKey], deadline_ns: int) -> bytes:
        """A byte a key, 1 where it can be read now."""
        ...

    def get(self, wants: Sequence[tuple[BlockKey, int, Bytes, Bytes]], deadline_ns: int, check: Callable[[int], bool] = ...) -> list[bool]:
        """Fill header and payload targets of (key, frame length, header, payload); which came and passed `check`, by their positions."""
        ...


Targets = Sequence[Bytes] | Mapping[int, Bytes] | Bytes
"""Where the payload of the block at a position goes: rows, or by position."""


class Asked(NamedTuple):
    """One node's part: the blocks at these positions. It has failed, not just been late, if it hasn't answered at `fair_ns`."""

    link: NodeLink
    reach: KeyedReach
    positions: Sequence[int]
    fair_ns: int


class Keyed:
    """The blocks of one call: `keys`, of `counts` tokens each; `holders[j]` is whom to ask for block j, in order."""

    def __init__(
        self,
        core: Core,
        holders: Sequence[Sequence[Holder]],
        refs: Mapping[str, NodeRef],
        keys: Sequence[BlockKey],
        counts: Sequence[int],
    ) -> None:
        self._core = core
        self._holders = holders
        self._refs = refs
        self._keys = keys
        self._counts = counts
        self._known: dict[int, tuple[NodeLink, KeyedReach] | None] = {}

    def asked(self, positions: Sequence[int]) -> list[Asked]:
        """Who is asked for which of these blocks; nobody for those that would first be asked for otherwise."""
        if len(positions) == len(self._holders) > 0 and alike(self._holders):
            found = self._found(self._holders[0])
            return [Asked(*found, positions, self._fair_ns(positions))] if found is not None else []
        groups: dict[str, tuple[NodeLink, KeyedReach, list[int]]] = {}
        last: Sequence[Holder] | None = None
        group: list[int] | None = None
        for j in positions:
            holders = self._holders[j]
            if holders is not last:  # blocks of an extent share them
                last, found = holders, self._found(holders)
                group = None if found is None else groups.setdefault(found[0].node.node_id, (*found, []))[2]
            if group is not None:
                group.append(j)
        return [Asked(link, reach, some, self._fair_ns(some)) for link, reach, some in groups.values()]

    def answers(self, j: int) -> bool:
        """Whether block j is to be asked for by key first."""
        return self._found(self._holders[j]) is not None

    def probe(self, one: Asked, deadline_ns: int) -> bytes:
        """A byte for each of one node's blocks, 1 where it can be had now."""
        whole = len(one.positions) == len(self._keys)
        return one.reach.probe(self._keys if whole else [self._keys[j] for j in one.positions], deadline_ns)

    def get(self, one: Asked, targets: Targets, deadline_ns: int) -> list[int]:
        """The positions whose payloads have come from one node, and are what they should be."""
        glances = self._core.here.glances
        headers = np.empty((len(one.positions), self._core.framer.header_bytes), np.uint8)
        wants = [(self._keys[j], glances[self._counts[j]].frame_bytes, headers[k], targets[j]) for k, j in enumerate(one.positions)]

        def sound(k: int) -> bool:
            j = one.positions[k]
            return glances[self._counts[j]].sound(headers[k].tobytes(), self._keys[j], targets[j])

        return [j for j, good in zip(one.positions, one.reach.get(wants, deadline_ns, sound), strict=True) if good]

    def _fair_ns(self, positions: Sequence[int]) -> int:
        """By when these blocks come over a slow link."""
        counts = self._counts if len(positions) == len(self._counts) else [self._counts[j] for j in positions]
        nbytes = sum(counts) * self._core.framer.geometry.bytes_per_token
        return time.monotonic_ns() + STALL_NS + nbytes * SECOND // SLOWEST_BYTES_PER_S

    def _found(self, holders: Sequence[Holder]) -> tuple[NodeLink, KeyedReach] | None:
        """The open connection to the first that is to be asked, if it answers keys."""
        if id(holders) not in self._known:
            self._known[id(holders)] = self._find(holders)
        return self._known[id(holders)]

    def _find(self, holders: Sequence[Holder]) -> tuple[NodeLink, KeyedReach] | None:
        links = self._core.links
        for node_id, fetch_from in holders:
            ref = self._refs[node_id]
            if links.resting(ref) or links.slow(ref):
                continue
            link = links.opened(ref)
            if link is None or fetch_from or not _answers_keys(type(link.reach)):
                return None
            return link, cast("KeyedReach", link.reach)
        return None


@lru_cache(maxsize=64)
def _answers_keys(kind: type[Reach]) -> bool:
    """Whether reaches of this class are a `KeyedReach`: a look that takes long."""
    return issubclass(kind, KeyedReach)


async def blame(core: Core, one: Asked, error: KvpoolError, deadline_ns: int) -> None:
    """Judge a node that was asked by key, until `deadline_ns` at most, and its connection, by the error that came of it."""
    ref = one.link.node
    log.warning("node %s, asked by key: %s", ref.node_id[:8], error)
    if isinstance(error, ConfigError):
        return
    if isinstance(error, DeadlineError) and deadline_ns < one.fair_ns:
        core.links.late(ref)
    elif not (isinstance(error, ClosedError) and core.closed):
        reach = one.link.reach.name if isinstance(error, UnavailableError) else None
        await core.links.failed(ref, "data", reach=reach, link=one.link)
