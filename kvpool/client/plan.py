"""Pure planning: where each block of a chain lives, and which bytes travel together.

A transfer is cut into *windows*: consecutive blocks that fit one staging buffer. Inside a window each lease's frames become
runs of (arena offset, length, position in the buffer); runs adjacent on both sides become one. A block that is read has one
place; one that is written has as many as it gets copies, and they share its bytes in the buffer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kvpool.block import BlockKey
from kvpool.policy.placement import PlacedNode, Placement, blocks_per_extent, place
from kvpool.transport import Run, merge_runs

Place = tuple[int, int]
"""(number of the lease among those of a transfer, arena offset)."""
Piece = tuple[int, int, tuple[Place, ...]]
"""(index in the chain, frame length, places)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Blocks that are staged together.

    `spots[j]` is (index of the block in its chain, start, length) in the buffer, `leases[j]` the numbers of the leases under which it
    is read or written; `runs` holds each lease's transfers.
    """

    spots: tuple[tuple[int, int, int], ...]
    leases: tuple[tuple[int, ...], ...]
    runs: dict[int, tuple[Run, ...]]


def placements(
    chain: Sequence[BlockKey], first: int, count: int, block_tokens: int, extent_tokens: int, nodes: Sequence[PlacedNode], copies: int
) -> list[Placement]:
    """Where each of chain[first : first + count] lives: the same whatever part of the chain is asked for."""
    extent = blocks_per_extent(block_tokens, extent_tokens)
    start = first - first % extent
    found: list[Placement] = []
    for one in _extents(tuple(chain[start : first + count : extent]), tuple(nodes), copies):
        found += [one] * extent
    return found[first - start : first - start + count]


@lru_cache(maxsize=64)
def _extents(heads: tuple[BlockKey, ...], nodes: tuple[PlacedNode, ...], copies: int) -> list[Placement]:
    """Where extents live: many calls are about the same ones under the same view."""
    return place(heads, 1, nodes, copies)


def alike(items: Sequence[object]) -> bool:
    """Whether all items are equal: quick where they are the same object."""
    return not items or items.count(items[0]) == len(items)


def leading(present: Sequence[object]) -> int:
    """How many truthy items `present` starts with."""
    for position, item in enumerate(present):
        if not item:
            return position
    return len(present)


def windows(pieces: Sequence[Piece], budget: int) -> Iterator[Window]:
    """Cut `pieces` into windows of at most `budget` bytes, at least one piece each."""
    batch: list[Piece] = []
    filled = 0
    for piece in pieces:
        if batch and filled + piece[1] > budget:
            yield _window(batch)
            batch, filled = [], 0
        batch.append(piece)
        filled += piece[1]
    if batch:
        yield _window(batch)


def _window(batch: Sequence[Piece]) -> Window:
    spots: list[tuple[int, int, int]] = []
    runs: dict[int, list[Run]] = {}
    at = 0
    for index, length, places in batch:
        spots.append((index, at, length))
        for lease, offset in places:
            runs.setdefault(lease, []).append(Run(offset=offset, length=length, at=at))
        at += length
    return Window(
        spots=tuple(spots),
        leases=tuple(tuple(lease for lease, _ in places) for _, _, places in batch),
        runs={lease: merge_runs(some) for lease, some in runs.items()},
    )
