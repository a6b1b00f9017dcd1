"""Which node owns a block: weighted rendezvous hashing over extents.

An *extent* is a run of consecutive blocks of one chain (512 tokens unless told otherwise), named by the key of its first
block. All blocks of an extent live on one node, so that a request touches few nodes with one batched call each, while long
prefixes spread over the cluster. Since a key hashes its whole prefix, an extent's name depends on everything before it too.

Owner of an extent = the node with the best score. For a node of weight w the score is w / -ln(u), with u in (0, 1) a hash of
(extent head, node id): each node draws from an exponential race, and node i wins with chance w_i / sum(w). Nodes don't see
each other in their scores, so one that joins takes only its own share, one that leaves gives away only its own, and the order
behind the winner is the order of replicas. Nothing is stored, so nothing can go stale.

u = fmix64(xxh3_64(head) xor xxh3_64(id)), the top 53 bits: both inputs are mixed before they meet and once after.
Equal scores are decided by the smaller id.
"""

from collections.abc import Sequence
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


class NodeWeight(NamedTuple):
    """A live node and its share: twice the weight, twice the blocks. Usually its capacity in bytes."""

    id: str
    weight: float = 1.0


def blocks_per_extent(block_tokens: int, extent_tokens: int = DEFAULT_EXTENT_TOKENS) -> int:
    """Blocks in one extent: as many as fit in `extent_tokens`, at least one."""
    if block_tokens < 1 or extent_tokens < 1:
        raise ConfigError(f"block_tokens and extent_tokens must be positive, got {block_tokens} and {extent_tokens}")
    return max(1, extent_tokens // block_tokens)


def extent_heads(keys: Sequence[BlockKey], blocks_per_extent: int) -> list[BlockKey]:
    """For each key of a chain the key that heads its extent; `keys` start at the chain's first block."""
    if blocks_per_extent < 1:
        raise ConfigError(f"blocks_per_extent must be positive, got {blocks_per_extent}")
    heads: list[BlockKey] = []
    for head in keys[::blocks_per_extent]:
        heads += [head] * blocks_per_extent
    del heads[len(keys) :]
    return heads


def owner(extent_head: bytes, nodes: Sequence[NodeWeight]) -> str:
    """The id of the node that owns the extent. Raises `ConfigError` when there is no node."""
    return owners([extent_head], nodes)[0]


def owners(heads: Sequence[bytes], nodes: Sequence[NodeWeight]) -> list[str]:
    """The owner's id for each extent head; one vectorised pass."""
    ids, seeds, weights = _table(tuple(nodes))
    if not heads:
        return []
    best = _race(heads, seeds, weights).argmin(axis=1)
    return [ids[i] for i in best.tolist()]


def ranked(extent_head: bytes, nodes: Sequence[NodeWeight], count: int | None = None) -> tuple[str, ...]:
    """Node ids from the owner down, the first `count` (all by default): owner, first replica, second replica..."""
    ids, seeds, weights = _table(tuple(nodes))
    order = np.argsort(_race([extent_head], seeds, weights)[0], kind="stable")
    return tuple(ids[i] for i in order.tolist()[:count])


def assign(keys: Sequence[BlockKey], blocks_per_extent: int, nodes: Sequence[NodeWeight]) -> list[str]:
    """The owner's id for each block of a chain; `keys` start at the chain's first block."""
    if blocks_per_extent < 1:
        raise ConfigError(f"blocks_per_extent must be positive, got {blocks_per_extent}")
    placed: list[str] = []
    for node_id in owners(keys[::blocks_per_extent], nodes):
        placed += [node_id] * blocks_per_extent
    del placed[len(keys) :]
    return placed


@lru_cache(maxsize=32)
def _table(nodes: tuple[NodeWeight, ...]) -> tuple[tuple[str, ...], npt.NDArray[np.uint64], _Floats]:
    """Ids, id hashes and weights, in order of id. A view of the cluster lasts for many calls, hence the cache."""
    if not nodes:
        raise ConfigError("no pool node is alive: there is nobody to own a block; start one or wait for membership")
    ordered = sorted(nodes)
    ids = tuple(node.id for node in ordered)
    if len(set(ids)) != len(ids):
        raise ConfigError(f"a node id appears twice: {', '.join(ids)}")
    for node in ordered:
        if not (isfinite(node.weight) and node.weight > 0):
            raise ConfigError(f"node {node.id} has weight {node.weight}; give a positive number or leave the node out")
    seeds = np.array([xxhash.xxh3_64_intdigest(node_id.encode()) for node_id in ids], dtype=np.uint64)
    return ids, seeds, np.array([node.weight for node in ordered], dtype=np.float64)


def _race(heads: Sequence[bytes], seeds: npt.NDArray[np.uint64], weights: _Floats) -> _Floats:
    """Arrival times [heads, nodes] of the exponential race, the inverse of the scores: the earliest wins."""
    digest = xxhash.xxh3_64_intdigest
    mixed = np.array([digest(head) for head in heads], dtype=np.uint64)[:, None] ^ seeds
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    times: _Floats = -np.log(uniform) / weights
    return times
