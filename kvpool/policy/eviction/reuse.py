"""When do blocks come back? A hazard of reuse by class and age, learnt while it happens.

Theory. A block that was used at some time comes back after a while, or never. What is learnt is the *hazard*: of the blocks of a class
that have reached an age, which share is used again within the next bin of ages. Ages are binned by their logarithm. The hazard need
not fall with age: after an answer people take time to read before they ask again.

Samples are unbiased, because they are followed whether or not their block is still resident: one block of every group that was used
together. A sample that reaches the end of a bin without a use is an *exposure* of that bin; one that is used in a bin is an exposure and
an *event*.

Classes are many and each sees little, so they share: a class is a tuple (kind, feature, feature…), its hazard is its kind's, times one
factor for each value of each feature, times what is its own, each drawn towards the level above it as long as it has seen little (a
multiplicative model fitted by alternating, with pseudo-counts). Counts fade with a half-life in requests, so that a change of the load is
followed.

The *index* of a class at an age is Gittins': the best ratio, over all horizons, of the chance of a use to the time that the room is
taken until then (J. Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979). It is what one block's room is worth per second
now, whoever else wants it; computed backwards over the bins with a stack, since joining a bin to the next pays exactly when the next has
the better ratio.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from operator import mul
from typing import Final

_FINE: Final = 30  # exponent of two, in ns: about a second
EDGES_NS: Final[list[int]] = [1 << e for e in range(20, _FINE)] + [int(2 ** (_FINE + i / 2)) for i in range(32)]
"""Where bins of age end: 1 ms to 1 s by powers of two, from there to 14 hours by their roots; a last bin has no end."""
BINS: Final = len(EDGES_NS) + 1
_STARTS_NS = [0, *EDGES_NS]
_WIDTHS_S = [(end - start) / 1e9 for start, end in zip(_STARTS_NS, EDGES_NS, strict=False)] + [EDGES_NS[-1] / 1e9]

_PRIOR = 0.02  # hazard of a bin before anything was seen
_ROOT_WEIGHT = 8.0  # pseudo-counts: how much a level must have seen to be believed rather than the one above
_KIND_WEIGHT = 32.0
_OWN_WEIGHT = 64.0
_FACTOR_WEIGHT = 8.0
_CARRY = 0.8  # how far a bin of the root resembles the one before
_MOST = 0.9  # a hazard is never certainty
_FACTOR_RANGE = 100.0
_MAX_SAMPLES = 16_384
_HALF_LIFE = 4096.0  # in requests
_SLOWER = 0.1  # the classes' own counts fade this much slower: they see less

Class = tuple[int, ...]
"""(kind,) or (kind, feature, feature…)."""


class Table:
    """What is known of one class: exposures and events by bin, the hazard and the index that follow."""

    __slots__ = ("cls", "events", "exposed", "factor", "hazard", "index", "up")

    def __init__(self, cls: Class, up: "Table | None") -> None:
        self.cls = cls
        self.up = up
        self.exposed = [0.0] * BINS
        self.events = [0.0] * BINS
        self.hazard = [_PRIOR] * BINS
        self.index = [0.0] * BINS
        self.factor = 1.0


class _Sample:
    __slots__ = ("next_bin", "since_ns", "table")

    def __init__(self, since_ns: int, table: Table) -> None:
        self.since_ns = since_ns
        self.table: Table | None = table  # None: no longer followed
        self.next_bin = 0


class ReuseHazard:
    """The tables of one policy. Follows at most 16,384 samples; knows as many classes as its user makes."""

    def __init__(self) -> None:
        self._root = Table((), None)
        self._tables: dict[Class, Table] = {}
        self._factors: dict[int, dict[tuple[int, int], float]] = {}  # by kind: (feature, value): factor
        self._samples: OrderedDict[object, _Sample] = OrderedDict()
        self._waiting: list[deque[_Sample]] = [deque() for _ in range(BINS)]  # by the bin they are in
        self._solve(self._root)

    def table(self, cls: Class) -> Table:
        """The table of a class, made when it is new."""
        known = self._tables.get(cls)
        if known is None:
            up = self._root if len(cls) == 1 else self.table(cls[:1])
            known = self._tables[cls] = Table(cls, up)
            self._solve(known)
        return known

    def follow(self, key: object, since_ns: int, table: Table) -> None:
        """Take the block as a sample of the class, used last at `since_ns`."""
        before = self._samples.pop(key, None)
        if before is not None:
            before.table = None
        sample = self._samples[key] = _Sample(since_ns, table)
        self._waiting[0].append(sample)
        if len(self._samples) > _MAX_SAMPLES:
            self._samples.popitem(last=False)[1].table = None

    def used(self, key: object, now_ns: int) -> None:
        """The block was used again: an event, if it was a sample."""
        sample = self._samples.pop(key, None)
        if sample is None or sample.table is None:
            return
        table: Table | None = sample.table
        assert table is not None
        sample.table = None
        reached = bisect_right(EDGES_NS, now_ns - sample.since_ns)
        for number in range(sample.next_bin, reached + 1):
            self._expose(table, number)
        while table is not None:
            table.events[reached] += 1
            table = table.up

    def advance(self, now_ns: int) -> None:
        """Count the bins that samples have left unused by now."""
        for number in range(BINS - 1):
            queue, edge = self._waiting[number], EDGES_NS[number]
            while queue and (queue[0].table is None or queue[0].since_ns + edge <= now_ns):
                sample = queue.popleft()
                if sample.table is not None:
                    self._expose(sample.table, number)
                    sample.next_bin = number + 1
                    self._waiting[number + 1].append(sample)
        last = self._waiting[-1]
        while last and last[0].table is None:
            last.popleft()

    def refresh(self, requests: int) -> None:
        """Let counts fade by `requests` more, and fit everything anew."""
        decay: float = 0.5 ** (requests / _HALF_LIFE)
        kinds = [table for table in self._tables.values() if table.up is self._root]
        leaves = [table for table in self._tables.values() if table.up is not self._root]
        for tables, fade in (([self._root, *kinds], decay), (leaves, decay**_SLOWER)):
            for table in tables:
                table.exposed = [count * fade for count in table.exposed]
                table.events = [count * fade for count in table.events]
        for table in (self._root, *kinds):
            self._solve(table)
        self._fit_factors(leaves)
        for table in leaves:
            self._solve(table)

    def _expose(self, table: Table, number: int) -> None:
        """One more exposure. A class counts the events to be expected by its kind, its kind the exposures that its factor makes of it."""
        up = table.up
        self._root.exposed[number] += 1
        if up is self._root or up is None:
            table.exposed[number] += 1
        else:
            table.exposed[number] += up.hazard[number]
            up.exposed[number] += table.factor

    def _fit_factors(self, leaves: list[Table]) -> None:
        by_kind: dict[int, list[tuple[Class, float, float]]] = {}
        for table in leaves:
            by_kind.setdefault(table.cls[0], []).append((table.cls, sum(table.events), sum(table.exposed)))
        for kind, seen in by_kind.items():
            factors = self._factors.setdefault(kind, {})
            for _ in range(2):
                for place in range(1, len(seen[0][0])):
                    found: dict[tuple[int, int], list[float]] = {}
                    for cls, events, expected in seen:
                        others = 1.0
                        for other in range(1, len(cls)):
                            if other != place:
                                others *= factors.get((other, cls[other]), 1.0)
                        sums = found.setdefault((place, cls[place]), [_FACTOR_WEIGHT, _FACTOR_WEIGHT])
                        sums[0] += events
                        sums[1] += expected * others
                    for name, (events, expected) in found.items():
                        factors[name] = events / expected

    def _solve(self, table: Table) -> None:
        """Hazard and index of one table, the levels above it being solved."""
        exposed, events = table.exposed, table.events
        if table.up is None:
            prior = _PRIOR
            for number in range(BINS):
                hazard = (events[number] + _ROOT_WEIGHT * prior) / (exposed[number] + _ROOT_WEIGHT)
                table.hazard[number] = hazard
                prior = _CARRY * hazard + (1 - _CARRY) * _PRIOR
        elif table.up is self._root:
            above = table.up.hazard
            factor = (sum(events) + _FACTOR_WEIGHT) / (sum(map(mul, exposed, above)) + _FACTOR_WEIGHT)
            table.hazard = [
                (event + _KIND_WEIGHT * min(_MOST, factor * base)) / (count + _KIND_WEIGHT)
                for event, count, base in zip(events, exposed, above, strict=True)
            ]
        else:
            factors, factor = self._factors.get(table.cls[0], {}), 1.0
            for place in range(1, len(table.cls)):
                factor *= factors.get((place, table.cls[place]), 1.0)
            factor *= (sum(events) + _FACTOR_WEIGHT) / (sum(exposed) * factor + _FACTOR_WEIGHT)
            table.factor = factor = min(max(factor, 1 / _FACTOR_RANGE), _FACTOR_RANGE)
            table.hazard = [
                min(_MOST, factor * base * (event + _OWN_WEIGHT) / (expected * factor + _OWN_WEIGHT))
                for event, expected, base in zip(events, exposed, table.up.hazard, strict=True)
            ]
        table.index = gittins(table.hazard)


def bin_of(age_ns: int) -> int:
    """Which bin an age is in."""
    return bisect_right(EDGES_NS, age_ns)


def gittins(hazard: list[float]) -> list[float]:
    """Per bin: the best chance of a use per second of room taken, over all horizons that begin with the bin."""
    index = [0.0] * BINS
    joined: list[tuple[float, float, float]] = []  # runs of bins ahead: (chance of a use, seconds taken, chance of none)
    for number in range(BINS - 1, -1, -1):
        chance, stays = hazard[number], 1 - hazard[number]
        seconds = _WIDTHS_S[number] * (1 - chance / 2)
        while joined and joined[-1][0] * seconds > chance * joined[-1][1]:
            ahead = joined.pop()
            chance += stays * ahead[0]
            seconds += stays * ahead[1]
            stays *= ahead[2]
        joined.append((chance, seconds, stays))
        index[number] = chance / seconds
    return index
