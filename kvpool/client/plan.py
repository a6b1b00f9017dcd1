"""Pure planning: who owns which block of a chain, and which bytes travel together.

A transfer is cut into *windows*: consecutive blocks that fit one staging buffer. Inside a window each node's frames become
runs of (arena offset, length, position in the buffer); runs adjacent on both sides become one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvpool.block import BlockKey
from kvpool.policy.placement import PlacedNode, blocks_per_extent, place
from kvpool.transport import Run, merge_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Blocks that are staged together.

    `spots[j]` is (index of the block in its chain, start, length) in the buffer, `nodes[j]` where it comes from or goes to;
    `runs` holds each node's transfers.
    """

    spots: tuple[tuple[int, int, int], ...]
    nodes: tuple[str, ...]
    runs: dict[str, tuple[Run, ...]]


def owners_of(chain: Sequence[BlockKey], first: int, count: int, block_tokens: int, nodes: Sequence[PlacedNode]) -> list[str]:
    """The node id that owns each of chain[first : first + count]. `nodes` must not be empty."""
    extent = blocks_per_extent(block_tokens)
    start = first - first % extent
    placed = place(chain[start : first + count], extent, nodes, 1)
    return [placed[i // extent].targets[0] for i in range(first - start, first - start + count)]


def by_node(owner_ids: Sequence[str]) -> dict[str, list[int]]:
    """Positions of each node's blocks, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for position, node_id in enumerate(owner_ids):
        groups.setdefault(node_id, []).append(position)
    return groups


def leading(present: Sequence[object]) -> int:
    """How many truthy items `present` starts with."""
    for position, item in enumerate(present):
        if not item:
            return position
    return len(present)


def windows(pieces: Sequence[tuple[int, str, int, int]], budget: int) -> Iterator[Window]:
    """Cut `pieces` of (index, node id, arena offset, length) into windows of at most `budget` bytes, at least one piece each."""
    batch: list[tuple[int, str, int, int]] = []
    filled = 0
    for piece in pieces:
        if batch and filled + piece[3] > budget:
            yield _window(batch)
            batch, filled = [], 0
        batch.append(piece)
        filled += piece[3]
    if batch:
        yield _window(batch)


def _window(batch: Sequence[tuple[int, str, int, int]]) -> Window:
    spots: list[tuple[int, int, int]] = []
    runs: dict[str, list[Run]] = {}
    at = 0
    for index, node_id, offset, length in batch:
        spots.append((index, at, length))
        runs.setdefault(node_id, []).append(Run(offset=offset, length=length, at=at))
        at += length
    return Window(
        spots=tuple(spots),
        nodes=tuple(node_id for _, node_id, _, _ in batch),
        runs={node_id: merge_runs(some) for node_id, some in runs.items()},
    )
