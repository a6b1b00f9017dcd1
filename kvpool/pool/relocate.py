"""Which extents to move so that a request fits contiguously: small windows around large holes.

Theory. Blocks of mixed sizes that leave in random order leave free bytes in holes, none of which may fit the next block. Most large
holes have small neighbours, though: moving those into other holes joins the large one with its surroundings. A plan is a *window*, a
run of pieces around one of the largest holes, at least as long as the request; its extents move out, into holes beyond the window,
so no move reads what another wrote and they may run in order. The cheapest window of one hole is found by walking from it
both ways, then sliding: for each reach to the left the shortest reach to the right. A walk ends at a piece that can't move (pinned, or
larger than any other hole) and at bounds on bytes and steps, so a plan costs a bounded amount of work in an arena of any size.

`movable` costs its owner lookups, so it is asked late: only about the extents of the window that is cheapest so far. A piece
that turns out to be pinned, or has no hole to go to, is marked, and the search around that hole repeated.
"""

import heapq
from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from kvpool.pool.holes import Holes
from kvpool.pool.values import Move

SIZE_SHIFT = 48
"""A tag is `size << SIZE_SHIFT | size of the piece before`, in bytes."""
BEFORE_MASK = (1 << SIZE_SHIFT) - 1

_SEEDS = 8
_STEPS = 48
_TRIES = 24


class _Window(NamedTuple):
    moved: int  # bytes of the extents in it
    seed: int
    start: int
    end: int


class Planner:
    """Looks for plans in the pieces of one allocator: `tags` by offset, holes among them."""

    __slots__ = ("_capacity_bytes", "_holes", "_tags")

    def __init__(self, tags: Mapping[int, int], holes: Holes, capacity_bytes: int) -> None:
        self._tags = tags
        self._holes = holes
        self._capacity_bytes = capacity_bytes

    def plan(self, size: int, movable: Callable[[int], bool], budget_bytes: int) -> list[Move] | None:
        """Moves of at most `budget_bytes` together after which `size` bytes lie free in one piece; None when none was found."""
        sizes = self._holes.sizes
        seeds = sorted(self._holes.largest(_SEEDS), key=lambda offset: (-sizes[offset], offset))
        if len(seeds) < 2:
            return None
        stuck: set[int] = set()
        widest = dict.fromkeys(seeds, sizes[seeds[0]])
        widest[seeds[0]] = sizes[seeds[1]]
        windows: list[_Window] = []
        for seed in seeds:
            self._push(windows, seed, size, budget_bytes, widest[seed], stuck)
        for _ in range(_TRIES):
            if not windows:
                break
            window = heapq.heappop(windows)
            extents = self._extents(window)
            pinned = [offset for _, offset in extents if not movable(offset)]
            if not pinned:
                moves = self._place(window, extents)
                if len(moves) == len(extents):
                    return moves
                pinned.append(extents[len(moves)][1])
            stuck.update(pinned)
            self._push(windows, window.seed, size, budget_bytes, widest[window.seed], stuck)
        return None

    def _push(self, windows: list[_Window], seed: int, size: int, budget_bytes: int, widest: int, stuck: Container[int]) -> None:
        """Add the cheapest window around `seed`, if there is one within the budget."""
        hole = self._holes.sizes[seed]
        missing = size - hole
        left = self._walk(seed, missing, budget_bytes, widest, stuck, leftwards=True)
        right = self._walk(seed, missing, budget_bytes, widest, stuck, leftwards=False)
        best, at = budget_bytes + 1, (0, 0)
        take = len(right) - 1
        for reach, moved in left:
            while take and reach + right[take - 1][0] >= missing:
                take -= 1
            if reach + right[take][0] >= missing and moved + right[take][1] < best:
                best, at = moved + right[take][1], (reach, right[take][0])
        if best <= budget_bytes:
            heapq.heappush(windows, _Window(best, seed, seed - at[0], seed + hole + at[1]))

    def _walk(
        self, seed: int, missing: int, budget_bytes: int, widest: int, stuck: Container[int], *, leftwards: bool
    ) -> list[tuple[int, int]]:
        """(bytes covered, bytes to move) after each piece on one side of a hole, from none on."""
        tags, holes = self._tags, self._holes.sizes
        steps = [(0, 0)]
        reach = moved = 0
        position = seed if leftwards else seed + holes[seed]
        for _ in range(_STEPS):
            if position == 0 if leftwards else position == self._capacity_bytes:
                break
            if leftwards:
                position -= tags[position] & BEFORE_MASK
            size = tags[position] >> SIZE_SHIFT
            if position not in holes:
                moved += size
                if size > widest or moved > budget_bytes or position in stuck:
                    break
            reach += size
            steps.append((reach, moved))
            if reach >= missing:
                break
            if not leftwards:
                position += size
        return steps

    def _extents(self, window: _Window) -> list[tuple[int, int]]:
        """(size, offset) of the extents in a window, largest first."""
        tags, holes = self._tags, self._holes.sizes
        extents: list[tuple[int, int]] = []
        position = window.start
        while position < window.end:
            size = tags[position] >> SIZE_SHIFT
            if position not in holes:
                extents.append((size, position))
            position += size
        extents.sort(reverse=True)
        return extents

    def _place(self, window: _Window, extents: list[tuple[int, int]]) -> list[Move]:
        """Moves of `extents` into holes outside the window, up to the first that finds none. Leaves the holes as they were."""
        holes = self._holes
        log: list[tuple[int, int]] = []  # (offset, size) of holes taken away, (offset, 0) of holes added
        moves: list[Move] = []
        position = window.start
        while position < window.end:
            size = self._tags[position] >> SIZE_SHIFT
            if position in holes.sizes:
                log.append((position, holes.drop(position)))
            position += size
        for size, source in extents:
            target = holes.fit(size)
            if target is None:
                break
            hole = holes.drop(target)
            log.append((target, hole))
            moves.append(Move(source, target, size))
            if hole > size:
                holes.add(target + size, hole - size)
                log.append((target + size, 0))
        for offset, size in reversed(log):
            if size:
                holes.add(offset, size)
            else:
                holes.drop(offset)
        return moves
