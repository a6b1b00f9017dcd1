"""Which nodes hold a block: weighted rendezvous hashing over extents, spread over failure domains, true while nodes come and go.

An *extent* is a run of consecutive blocks of one chain (512 tokens unless told otherwise), named by the key of its first
block. All blocks of an extent live on the same nodes, so that a request touches few nodes with one batched call each, while long
prefixes spread over the cluster. Since a key hashes its whole prefix, an extent's name depends on everything before it too.

Each extent ranks the nodes by score. For a node of weight w the score is w / -ln(u), with u in (0, 1) a hash of
(extent head, node id): each node draws from an exponential race, and node i wins with chance w_i / sum(w). Nodes don't see
each other in their scores, so one that joins takes only its own share and one that leaves gives away only its own. Nothing is
stored, so nothing can go stale.

u = fmix64(xxh3_64(head) xor xxh3_64(id)), the top 53 bits: both inputs are mixed before they meet and once after.
Equal scores are decided by the smaller id.

The *targets* of n copies are chosen from the ranking: the winner, then always the next one in a zone that has no copy yet; when
every zone has one, the next in a rack without; then in a host without; then the next one. Domains nest (a rack is one of its
zone), therefore a node that comes or goes exchanges at most one target of an extent, whatever the domains.

Which nodes take part follows from their states:

| state | written to | asked, in this order |
|---|---|---|
| active | yes | as a target |
| joining | yes | as a target; it has no data yet, so those it displaces are asked next |
| draining | no | after the targets, where it was one before it began to leave |
| quarantined | no | no |
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool.block import BlockKey
from kvpool.errors import ConfigError

DEFAULT_EXTENT_TOKENS = 512

_Floats = npt.NDArray[np.float64]


class NodeState(StrEnum):
    """Where a node stands in its life; the table above says what that means for its blocks."""

    JOINING = "joining"
    ACTIVE = "active"
    DRAINING = "draining"
    QUARANTINED = "quarantined"


class PlacedNode(NamedTuple):
    """A live node as placement sees it: twice the weight, twice the blocks (usually its capacity in GiB), and what it fails with.

    `host`, `rack`, `zone` are names, "" where unknown: then a node is a host of its own, in the one unnamed rack and zone.
    """

    id: str
    weight: float = 1.0
    state: NodeState = NodeState.ACTIVE
    host: str = ""
    rack: str = ""
    zone: str = ""


class Placement(NamedTuple):
    """Where one extent lives: `targets` hold its copies, `order` is whom to ask for it, the likeliest first."""

    targets: tuple[str, ...]
    order: tuple[str, ...]


def node_from_info(node_id: str, info: Mapping[str, str], *, quarantined: bool = False) -> PlacedNode:
    """The node that a member's `info` describes. What is missing or senseless has its default, for everybody alike."""
    try:
        weight = float(info.get("weight", "1"))
    except ValueError:
        weight = 1.0
    state = info.get("state", "")
    return PlacedNode(
        id=node_id,
        weight=weight if isfinite(weight) and weight > 0 else 1.0,
        state=NodeState.QUARANTINED if quarantined else NodeState(state) if state in set(NodeState) else NodeState.ACTIVE,
        host=info.get("host", ""),
        rack=info.get("rack", ""),
        zone=info.get("zone", ""),
    )


def blocks_per_extent(block_tokens: int, extent_tokens: int = DEFAULT_EXTENT_TOKENS) -> int:
    """Blocks in one extent: as many as fit in `extent_tokens`, at least one."""
    if block_tokens < 1 or extent_tokens < 1:
        raise ConfigError(f"block_tokens and extent_tokens must be positive, got {block_tokens} and {extent_tokens}")
    return max(1, extent_tokens // block_tokens)


def ranked(head: bytes, nodes: Sequence[PlacedNode], count: int | None = None) -> tuple[str, ...]:
    """Ids of all `nodes`, whatever their state, from the best score down; the first `count` (all by default)."""
    table = _table(tuple(nodes))
    return tuple(table.ids[i] for i in table.rank([head])[0][:count])


def write_targets(head: bytes, nodes: Sequence[PlacedNode], copies: int) -> tuple[str, ...]:
    """The nodes that should hold the extent of `head`: `copies` of them, fewer when fewer may be written to."""
    return place([BlockKey(head)], 1, nodes, copies)[0].targets


def read_order(head: bytes, nodes: Sequence[PlacedNode], copies: int) -> tuple[str, ...]:
    """The nodes to ask for the extent of `head`: its targets, then who they were before nodes began to join or drain."""
    return place([BlockKey(head)], 1, nodes, copies)[0].order


def place(keys: Sequence[BlockKey], blocks_per_extent: int, nodes: Sequence[PlacedNode], copies: int) -> list[Placement]:
    """Where the extents of a chain live, one an extent, in one vectorised pass; `keys` start at the chain's first block.

    Without a node that may be written to there are no targets. Raises `ConfigError` for senseless arguments.
    """
    if blocks_per_extent < 1 or copies < 1:
        raise ConfigError(f"blocks_per_extent and copies must be positive, got {blocks_per_extent} and {copies}")
    heads = keys[::blocks_per_extent]
    table = _table(tuple(nodes))
    if not heads or not table.ids:
        return [Placement((), ())] * len(heads)
    return [table.place(ranking, copies) for ranking in table.rank(heads)]


class _Table:
    """What is the same for every extent under one view."""

    def __init__(self, nodes: Sequence[PlacedNode]) -> None:
        ordered = sorted(nodes)
        self.ids = tuple(node.id for node in ordered)
        if len(set(self.ids)) != len(self.ids):
            raise ConfigError(f"a node id appears twice: {', '.join(self.ids)}")
        for node in ordered:
            if not (isfinite(node.weight) and node.weight > 0):
                raise ConfigError(f"node {node.id} has weight {node.weight}; give a positive number or leave the node out")
        self._seeds = np.array([xxhash.xxh3_64_intdigest(node_id.encode()) for node_id in self.ids], dtype=np.uint64)
        self._weights = np.array([node.weight for node in ordered], dtype=np.float64)
        self._now = [node.state in (NodeState.ACTIVE, NodeState.JOINING) for node in ordered]
        self._before = [node.state in (NodeState.ACTIVE, NodeState.DRAINING) for node in ordered]
        self._levels = _levels(ordered)

    def rank(self, heads: Sequence[bytes]) -> list[list[int]]:
        """For each head the nodes by arrival time in the exponential race, the inverse of the score: the earliest is first."""
        digest = xxhash.xxh3_64_intdigest
        mixed = np.array([digest(head) for head in heads], dtype=np.uint64)[:, None] ^ self._seeds
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(0xFF51AFD7ED558CCD)
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(0xC4CEB9FE1A85EC53)
        mixed ^= mixed >> np.uint64(33)
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        times: _Floats = -np.log(uniform) / self._weights
        ranking: list[list[int]] = np.argsort(times, axis=1, kind="stable").tolist()
        return ranking

    def place(self, ranking: Sequence[int], copies: int) -> Placement:
        """Targets and order for one ranking."""
        targets = tuple(self.ids[i] for i in self._spread([i for i in ranking if self._now[i]], copies))
        if self._now == self._before:
            return Placement(targets, targets)
        before = (self.ids[i] for i in self._spread([i for i in ranking if self._before[i]], copies))
        return Placement(targets, tuple(dict.fromkeys((*targets, *before))))

    def _spread(self, ranking: list[int], copies: int) -> list[int]:
        """The first `copies` of `ranking`, domain by domain: zones without a copy first, then racks, then hosts, then any."""
        chosen: list[int] = []
        for domain in self._levels:
            used, left = {domain[i] for i in chosen}, list[int]()
            for i in ranking:
                if len(chosen) == copies:
                    return chosen
                if domain[i] in used:
                    left.append(i)
                else:
                    used.add(domain[i])
                    chosen.append(i)
            ranking = left
        return chosen


def _levels(nodes: Sequence[PlacedNode]) -> list[list[tuple[str, ...]]]:
    """The domain of each node, from the widest kind to the node itself; kinds in which all are together tell nothing."""
    zones: list[tuple[str, ...]] = [(node.zone,) for node in nodes]
    racks: list[tuple[str, ...]] = [(node.zone, node.rack) for node in nodes]
    hosts: list[tuple[str, ...]] = [(node.zone, node.rack, node.host or node.id) for node in nodes]
    levels = [level for level in (zones, racks, hosts) if len(set(level)) > 1]
    return [*levels, [(node.id,) for node in nodes]]


@lru_cache(maxsize=32)
def _table(nodes: tuple[PlacedNode, ...]) -> _Table:
    """A view of the cluster lasts for many calls."""
    return _Table(nodes)
