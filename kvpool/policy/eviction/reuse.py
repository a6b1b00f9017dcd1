"""When do blocks come back? A hazard of reuse by class and age, learnt while it happens.

Theory. A block that was used at some time comes back after a while, or never. What is learnt is the *hazard*: of the blocks of a class
that have reached an age, which share is used again within the next bin of ages. Ages are binned by their logarithm. The hazard need
not fall with age: after an answer people take time to read before they ask again.

Samples are unbiased, because they are followed whether or not their block is still resident: one block of every group that was used
together. A sample counts in a bin when its age would have passed the end of the bin: as an *exposure*, and as an *event* if it was used
there. To count a use at once, before those that wait as long have had their time, would make the oldest ages seen look best.

Classes are many and each sees little, so they share (proportional hazards, D. R. Cox, "Regression Models and Life-Tables", 1972):

    hazard(class, bin) = base(kind, bin) x factor of each feature's value x what is the class's own

* The base has the shape over ages. It is fitted to all samples of a kind, each weighted by its factors, and drawn towards that of all
  kinds; that one is drawn, weakly, towards a guess of how long people think. These counts fade slowly. A second set fades fast, and what
  it says of the load of the moment multiplies the base: a ratio by bin, drawn towards that of the bin before.
* A class counts its events, and the events to be expected by the base of that moment. So a change of the load that all classes share
  leaves the ratio alone, and these counts may fade slower still. From them the factors come by iterative fitting, one feature at a
  time, each value drawn towards its neighbours, and then what is left of each class.

Every ratio is (events + weight x what to believe without them) / (events expected + weight), the mean of a gamma distribution: believed
only as far as it was seen.

The *index* of a class at an age is Gittins': the best ratio, over all horizons, of the chance of a use to the time that the room is
taken until then (J. Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979). It is what one block's room is worth per second
now, whoever else wants it; computed backwards over the bins with a stack, since joining a bin to the next pays exactly when the next has
the better ratio. No horizon is shorter than four steps of the clock: else what came within one tick would be worth anything.

Memory: at most 16,384 samples (about twice that in the queues) and 2,048 classes of a kind.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from math import log2
from operator import mul
from typing import Final

_FINE: Final = 30  # exponent of two, in ns: about a second
EDGES_NS: Final[list[int]] = [1 << e for e in range(20, _FINE)] + [int(2 ** (_FINE + i / 2)) for i in range(32)]
"""Where bins of age end: 1 ms to 1 s by powers of two, from there to 14 hours by their roots; a last bin has no end."""
BINS: Final = len(EDGES_NS) + 1
_STARTS_NS = [0, *EDGES_NS]
_WIDTHS_S = [(end - start) / 1e9 for start, end in zip(_STARTS_NS, EDGES_NS, strict=False)] + [EDGES_NS[-1] / 1e9]

_GUESS: Final = [0.1 * min(1.0, (end / 60e9) ** 0.9) for end in EDGES_NS] + [0.1]
"""Hazards before anything was seen: nearly even over the first minute, from there by the logarithm of the age."""

_ROOT_WEIGHT = 0.5  # events that a level must have seen to be believed as much as what it is drawn to
_KIND_WEIGHT = 4.0
_RECENT_WEIGHT = 8.0
_FACTOR_WEIGHT = 16.0
_CLASS_WEIGHT = 32.0
_KIND_CARRY = 0.5  # how far a ratio resembles that of the bin before
_RECENT_CARRY = 0.9
_MOST = 0.9  # a hazard is never certainty
_FACTOR_RANGE = 100.0
_STEPS = 4  # to a doubling: how finely the factor of a class is told from others when indices are computed
_LEAST_STEPS = 4  # of the clock: the shortest horizon
_MAX_SAMPLES = 16_384
_MAX_CLASSES = 2048
_HALF_LIFE = 4000.0  # in requests
_RECENT_HALF_LIFE = 200.0
_SLOWER = 0.05  # how much slower the counts of classes fade
_KEEP = 100.0  # exposures of a bin that don't fade
_FIT_EVERY = 128  # requests
_SWEEPS = 2

Name = tuple[int, ...]
"""Of a class: (kind,) or (kind, feature, feature…), always as many features for one kind."""


class Class:
    """What is known of one class besides its kind."""

    __slots__ = ("events", "expected", "factor", "kind", "name")

    def __init__(self, name: Name, kind: "_Kind") -> None:
        self.name = name
        self.kind = kind
        self.events = 0.0
        self.expected = 0.0  # events, if it were like all of its kind
        self.factor = 1.0

    def features(self) -> float:
        """The product of its features' factors."""
        product, factors = 1.0, self.kind.factors
        for feature in enumerate(self.name[1:], 1):
            product *= factors.get(feature, 1.0)
        return product

    def settle(self) -> None:
        """Its factor: those of its features, times what is its own."""
        factor = self.features()
        factor *= (self.events + _CLASS_WEIGHT) / (self.expected * factor + _CLASS_WEIGHT)
        self.factor = min(max(factor, 1 / _FACTOR_RANGE), _FACTOR_RANGE)


class _Counts:
    """Exposures and events by bin."""

    __slots__ = ("events", "exposed")

    def __init__(self) -> None:
        self.exposed = [0.0] * BINS
        self.events = [0.0] * BINS

    def fade(self, decay: float, keep: float = 0.0) -> None:
        """Let counts fade, but no bin below `keep` exposures."""
        for number, count in enumerate(self.exposed):
            if count > keep:
                kept = max(decay, keep / count)
                self.exposed[number] *= kept
                self.events[number] *= kept

    def correct(self, base: list[float], weight: float, carry: float = 0.0) -> list[float]:
        """The hazard `base`, times the ratio of events to those it lets expect."""
        hazard, ratio = [], 1.0
        for expected, event, count in zip(base, self.events, self.exposed, strict=True):
            found = (event + weight * ratio) / (count * expected + weight)
            hazard.append(min(_MOST, expected * found))
            ratio = 1 + carry * (found - 1)
        return hazard


class _Kind:
    """The hazard of one kind, or of all together (the root), and the counts it follows from."""

    __slots__ = ("classes", "counts", "factors", "hazard", "indices", "recent")

    def __init__(self) -> None:
        self.counts = _Counts()
        self.recent = _Counts()
        self.hazard = _GUESS
        self.indices: dict[int, list[float]] = {}  # by logarithm of the factor; made when asked for
        self.classes: dict[Name, Class] = {}
        self.factors: dict[tuple[int, int], float] = {}  # (place of the feature, value): factor

    def solve(self, root: "_Kind") -> None:
        """The hazard of this kind: its own, drawn towards a multiple of the root's, and the load of the moment."""
        events, expected = sum(self.counts.events), sum(map(mul, self.counts.exposed, root.hazard))
        factor = (events + _KIND_WEIGHT) / (expected + _KIND_WEIGHT)
        base = self.counts.correct([min(_MOST, factor * hazard) for hazard in root.hazard], _KIND_WEIGHT, _KIND_CARRY)
        self.hazard = self.recent.correct(base, _RECENT_WEIGHT, _RECENT_CARRY)

    def fit(self, decay: float) -> None:
        """Let the counts of classes fade, then fit the factors to them."""
        self._forget()
        classes = list(self.classes.values())
        for cls in classes:
            cls.events *= decay
            cls.expected *= decay
        factors = self.factors
        products = {cls: cls.features() for cls in classes}
        for place in list(range(1, len(classes[0].name))) * _SWEEPS:
            sums: dict[int, list[float]] = {}
            for cls, product in products.items():
                found = sums.setdefault(cls.name[place], [0.0, 0.0])
                found[0] += cls.events
                found[1] += cls.expected * product
            changes: dict[int, float] = {}
            for value, (events, expected) in sums.items():
                before = factors.get((place, value), 1.0)
                below, above = (factors.get((place, near), 1.0) for near in (value - 1, value + 1))
                like = _FACTOR_WEIGHT * (below * above) ** 0.5
                now = factors[place, value] = (events + like) / (expected / before + _FACTOR_WEIGHT)
                changes[value] = now / before
            for cls in classes:
                products[cls] *= changes[cls.name[place]]
        for cls in classes:
            cls.settle()

    def _forget(self) -> None:
        """Too many classes: the half that saw least goes."""
        if len(self.classes) > _MAX_CLASSES:
            known = sorted(self.classes.values(), key=lambda cls: (-cls.events - cls.expected, cls.name))
            self.classes = {cls.name: cls for cls in known[: _MAX_CLASSES // 2]}
            used = {feature for name in self.classes for feature in enumerate(name[1:], 1)}
            self.factors = {feature: factor for feature, factor in self.factors.items() if feature in used}


class _Sample:
    __slots__ = ("cls", "since_ns", "used_bin")

    def __init__(self, since_ns: int, cls: Class) -> None:
        self.since_ns = since_ns
        self.cls: Class | None = cls  # None: no longer followed
        self.used_bin = -1  # not yet


class ReuseHazard:
    """The model of one policy."""

    def __init__(self) -> None:
        self._root = _Kind()
        self._kinds: dict[int, _Kind] = {}
        self._samples: OrderedDict[object, _Sample] = OrderedDict()
        self._waiting: list[deque[_Sample]] = [deque() for _ in range(BINS)]  # by the bin they are in
        self._queued = 0
        self._unfitted = 0
        self._least_s = 0.0

    def cls(self, name: Name) -> Class:
        """The class of that name, made when it is new."""
        kind = self._kinds.get(name[0])
        if kind is None:
            kind = self._kinds[name[0]] = _Kind()
            kind.solve(self._root)
        known = kind.classes.get(name)
        if known is None:
            known = kind.classes[name] = Class(name, kind)
            known.settle()
        return known

    def index(self, cls: Class, number: int) -> float:
        """Chance of a use per second of room taken, for a block of the class whose age is in bin `number`."""
        step = round(_STEPS * log2(cls.factor))
        known = cls.kind.indices.get(step)
        if known is None:
            factor = 2.0 ** (step / _STEPS)
            known = gittins([min(_MOST, factor * hazard) for hazard in cls.kind.hazard], self._least_s)
            cls.kind.indices[step] = known
        return known[number]

    def follow(self, key: object, since_ns: int, cls: Class) -> None:
        """Take the block as a sample of the class, used last at `since_ns`."""
        before = self._samples.pop(key, None)
        if before is not None:
            before.cls = None
        sample = self._samples[key] = _Sample(since_ns, cls)
        self._waiting[0].append(sample)
        self._queued += 1
        if len(self._samples) > _MAX_SAMPLES:
            self._samples.popitem(last=False)[1].cls = None
        if self._queued > 2 * _MAX_SAMPLES:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drop from the queues what is followed no longer; where that isn't half, every second sample, used or not."""
        kept = [[sample for sample in queue if sample.cls is not None] for queue in self._waiting]
        if sum(map(len, kept)) > _MAX_SAMPLES:
            for queue in kept:
                for sample in queue[1::2]:
                    sample.cls = None
            kept = [queue[::2] for queue in kept]
        self._waiting = [deque(queue) for queue in kept]
        self._queued = sum(map(len, kept))

    def used(self, key: object, now_ns: int) -> None:
        """The block was used again: an event, if it was a sample, once the age it had has passed for the others too."""
        sample = self._samples.pop(key, None)
        if sample is not None:
            sample.used_bin = bin_of(now_ns - sample.since_ns)

    def advance(self, now_ns: int) -> None:
        """Count the bins whose end samples have passed by now.

        A class counts what its kind lets expect, the kind counts as much as the class's factor.
        """
        root = self._root.counts
        for number, edge in enumerate(EDGES_NS):
            queue, following, latest = self._waiting[number], self._waiting[number + 1], now_ns - edge
            while queue and (queue[0].cls is None or queue[0].since_ns <= latest):
                sample = queue.popleft()
                cls = sample.cls
                if cls is None:
                    self._queued -= 1
                    continue
                kind = cls.kind
                root.exposed[number] += 1
                cls.expected += kind.hazard[number]
                kind.counts.exposed[number] += cls.factor
                kind.recent.exposed[number] += cls.factor
                if sample.used_bin != number:
                    following.append(sample)
                    continue
                self._queued -= 1
                cls.events += 1
                for counts in (root, kind.counts, kind.recent):
                    counts.events[number] += 1

    def refresh(self, requests: int, step_ns: float) -> None:
        """Let counts fade by `requests` more, and fit everything anew. `step_ns`: by how much the clock goes on, when it does."""
        self._least_s = _LEAST_STEPS * step_ns / 1e9
        self._unfitted += requests
        decay: float = 0.5 ** (requests / _HALF_LIFE)
        recent: float = 0.5 ** (requests / _RECENT_HALF_LIFE)
        self._root.counts.fade(decay, _KEEP)
        self._root.hazard = self._root.counts.correct(_GUESS, _ROOT_WEIGHT)
        for kind in self._kinds.values():
            kind.counts.fade(decay, _KEEP)
            kind.recent.fade(recent)
            kind.solve(self._root)
            if self._unfitted >= _FIT_EVERY:
                kind.fit(0.5 ** (_SLOWER * self._unfitted / _HALF_LIFE))
            kind.indices = {}
        if self._unfitted >= _FIT_EVERY:
            self._unfitted = 0


def bin_of(age_ns: int) -> int:
    """Which bin an age is in."""
    return bisect_right(EDGES_NS, age_ns)


def gittins(hazard: list[float], least_s: float = 0.0) -> list[float]:
    """Per bin: the best chance of a use per second of room taken, over all horizons of at least `least_s` that begin with the bin."""
    index = [0.0] * BINS
    joined: list[tuple[float, float, float]] = []  # runs of bins ahead: (chance of a use, seconds taken, chance of none)
    for number in range(BINS - 1, -1, -1):
        chance, stays = hazard[number], 1 - hazard[number]
        seconds = _WIDTHS_S[number] * (1 - chance / 2)
        while joined and (seconds < least_s or joined[-1][0] * seconds > chance * joined[-1][1]):
            ahead = joined.pop()
            chance += stays * ahead[0]
            seconds += stays * ahead[1]
            stays *= ahead[2]
        joined.append((chance, seconds, stays))
        index[number] = chance / seconds
    return index
