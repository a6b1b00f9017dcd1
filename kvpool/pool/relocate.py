"""Which extents to move so that a request fits contiguously: small windows around large holes.

Theory. Blocks of mixed sizes that leave in random order leave free bytes in holes, none of which may fit the next block. A plan
is a *window*: a run of pieces around one of the largest holes. Each of its extents either moves *out*, into a hole elsewhere, or, where
no hole is large enough for it, *slides* to the start of the window, packed behind the ones before it. What is left of the window is
one hole. Moving out gains the extent's own bytes and costs a copy of them; sliding costs the same and gains nothing, but
always works: two holes with a large block between them become one.

The cheapest window of one hole is found by walking from it both ways, then sliding two pointers: for each reach to the left the
shortest reach to the right. A walk ends at a pinned piece and at bounds on bytes and steps, and only a few of the largest holes are
tried, so a plan costs a bounded amount of work in an arena of any size.

`movable` costs its owner lookups, so it is asked late: only about the extents of the window that is cheapest so far. A piece
that turns out to be pinned, or that finds no hole to move out to, is marked, and the search around that hole repeated.
"""

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvpool.pool.holes import Holes
from kvpool.pool.values import Move

SIZE_SHIFT = 48
"""A tag is `size << SIZE_SHIFT | size of the piece before`, in bytes."""
BEFORE_MASK = (1 << SIZE_SHIFT) - 1

_SEEDS = 16  # holes tried
_STEPS = 48  # pieces looked at on one side of a hole
_TRIES = 16  # windows tried


class _Window(NamedTuple):
    """Ordered by what it costs."""

    moved: int  # bytes of its extents
    seed: int  # offset of the hole it was found around
    start: int
    end: int


_Step = tuple[int, int, int]
"""A walk so far: (bytes gained, bytes moved, bytes covered); what is gained of the covered bytes comes free by the copies."""


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
        if len(seeds) < 2 or budget_bytes <= 0:
            return None
        search = _Search(self._tags, self._holes, self._capacity_bytes, size, budget_bytes, seeds)
        for _ in range(_TRIES):
            if not search.windows:
                break
            window = heapq.heappop(search.windows)
            extents = search.extents(window)
            pinned = [offset for _, offset in extents if not movable(offset)]
            search.pinned.update(pinned)
            if not pinned:
                moves = search.place(window, extents)
                if moves is not None:
                    return moves
            search.look_around(window.seed)
        return None


class _Search:
    """One plan in the making. `windows` is a heap; `pinned` can't move, `staying` can't move out: both only grow."""

    __slots__ = ("_budget_bytes", "_capacity_bytes", "_holes", "_seeds", "_size", "_tags", "pinned", "staying", "windows")

    def __init__(self, tags: Mapping[int, int], holes: Holes, capacity_bytes: int, size: int, budget_bytes: int, seeds: list[int]) -> None:
        self._tags, self._holes, self._capacity_bytes = tags, holes, capacity_bytes
        self._size, self._budget_bytes, self._seeds = size, budget_bytes, seeds
        self.pinned: set[int] = set()
        self.staying: set[int] = set()
        self.windows: list[_Window] = []
        for seed in seeds:
            self.look_around(seed)

    def look_around(self, seed: int) -> None:
        """Add the cheapest window around `seed` to the heap, if there is one within the budget."""
        hole = self._holes.sizes[seed]
        missing = self._size - hole
        left = self._walk(seed, missing, leftwards=True)
        right = self._walk(seed, missing, leftwards=False)
        best, left_bytes, right_bytes = self._budget_bytes + 1, 0, 0
        take = len(right) - 1
        for gained, moved, covered in left:
            while take and gained + right[take - 1][0] >= missing:
                take -= 1
            more, cost, reach = right[take]
            if gained + more >= missing and moved + cost < best:
                best, left_bytes, right_bytes = moved + cost, covered, reach
        if best <= self._budget_bytes:
            heapq.heappush(self.windows, _Window(best, seed, seed - left_bytes, seed + hole + right_bytes))

    def extents(self, window: _Window) -> list[tuple[int, int]]:
        """(size, offset) of the extents in a window, largest first."""
        return sorted(((size, offset) for offset, size, hole in self._pieces(window) if not hole), reverse=True)

    def place(self, window: _Window, extents: list[tuple[int, int]]) -> list[Move] | None:
        """Moves that leave one hole of the size wanted; None, and more are `staying`, when these can't. Leaves the holes as they were.

        Extents that move out go first, so that every slide finds its target free, up to the start of its source.
        """
        window = self._with_holes_beside(window)
        spare = window.end - window.start - self._size
        holes, widest = self._holes, self._widest(window.seed)
        log: list[tuple[int, int]] = []  # (offset, size) of holes taken away, (offset, 0) of holes added
        for offset, _, hole in self._pieces(window):
            if hole:
                log.append((offset, holes.drop(offset)))
        out: list[Move] = []
        slides: list[tuple[int, int]] = []
        for size, source in extents:
            target = None if size > widest or source in self.staying else holes.fit(size)
            if target is not None:
                left = holes.drop(target)
                log.append((target, left))
                out.append(Move(source, target, size))
                if left > size:
                    holes.add(target + size, left - size)
                    log.append((target + size, 0))
                continue
            self.staying.add(source)
            if size > spare:
                break
            spare -= size
            slides.append((source, size))
        for offset, size in reversed(log):
            if size:
                holes.add(offset, size)
            else:
                holes.drop(offset)
        if len(out) + len(slides) < len(extents):
            return None
        return out + _packed(window.start, sorted(slides))

    def _walk(self, seed: int, missing: int, *, leftwards: bool) -> list[_Step]:
        """The steps on one side of a hole, from none on, until `missing` bytes are gained. Steps that gain nothing are left out."""
        tags, holes, widest = self._tags, self._holes.sizes, self._widest(seed)
        budget_bytes, pinned, staying = self._budget_bytes, self.pinned, self.staying
        steps: list[_Step] = [(0, 0, 0)]
        gained = moved = covered = 0
        position = seed if leftwards else seed + holes[seed]
        edge = 0 if leftwards else self._capacity_bytes
        for _ in range(_STEPS):
            if position == edge or gained >= missing:
                break
            if leftwards:
                position -= tags[position] & BEFORE_MASK
            size = tags[position] >> SIZE_SHIFT
            covered += size
            if position in holes:
                gained += size
                steps.append((gained, moved, covered))
            else:
                moved += size
                if moved > budget_bytes or position in pinned:
                    break
                if size <= widest and position not in staying:
                    gained += size
                    steps.append((gained, moved, covered))
            if not leftwards:
                position += size
        return steps

    def _widest(self, seed: int) -> int:
        """About the largest hole that isn't `seed`: what is larger can't move out."""
        return self._holes.sizes[self._seeds[1 if seed == self._seeds[0] else 0]]

    def _pieces(self, window: _Window) -> list[tuple[int, int, bool]]:
        """(offset, size, is a hole) of a window's pieces, in order."""
        pieces: list[tuple[int, int, bool]] = []
        position = window.start
        while position < window.end:
            size = self._tags[position] >> SIZE_SHIFT
            pieces.append((position, size, position in self._holes.sizes))
            position += size
        return pieces

    def _with_holes_beside(self, window: _Window) -> _Window:
        """Holes that touch the window will be one with it, so nothing may be moved into them."""
        before = self._tags[window.start] & BEFORE_MASK
        start = window.start - before if window.start - before in self._holes.sizes else window.start
        return window._replace(start=start, end=window.end + self._holes.sizes.get(window.end, 0))


def _packed(start: int, slides: list[tuple[int, int]]) -> list[Move]:
    """Moves of (offset, size), in order of offset, to the bytes from `start` on."""
    moves: list[Move] = []
    for source, size in slides:
        if source != start:
            moves.append(Move(source, start, size))
        start += size
    return moves
