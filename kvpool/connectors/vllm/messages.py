"""What the two sides tell each other: a plan for each step to the ranks, a report of each step from them. Plain data, pickled by vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvpool.block import Namespace


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks first.. of a request's chain, into the engine's blocks `block_ids`, within `limit_ns`.

    `within_step`: before this step's forward needs them.
    """

    request_id: str
    first: int
    block_ids: list[int]
    within_step: bool
    limit_ns: int


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks first.. of a request's chain, out of the engine's blocks `block_ids`, which stay as they are until it is reported."""

    number: int
    request_id: str
    first: int
    block_ids: list[int]


@dataclass(slots=True)
class StepPlan:
    """One step's work for the ranks.

    `names[request]`: the names of its next blocks, after those that earlier plans told. `hand_offs`: requests that another engine goes on
    with as soon as this step has answered, so their saves, also those of earlier steps, are over by its end. `ended`: requests whose names
    are needed no more. `failures_seen`: how many failed loads within a step the scheduler knows of. `timed`: a number for
    `StepReport.computed`, where the time of the step is wanted.
    """

    names: dict[str, list[bytes]] = field(default_factory=dict)
    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    hand_offs: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    failures_seen: int = 0
    timed: int = 0


@dataclass(slots=True)
class StepReport:
    """What one rank, or all of them together, got done since the last report.

    `saved[number]`: for each rank that is done with a save, how many of its blocks the pool holds. `short[request]`: how many leading
    blocks of a load came, where it wasn't all. `failed_within`: failed loads within a step so far, of the rank that has most.
    `computed`: the number of a timed step that is computed now, else 0.
    """

    saved: dict[int, list[int]] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    failed_within: int = 0
    computed: int = 0

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        return not self.saved and not self.short and not self.computed

    def merged(self, other: "StepReport") -> "StepReport":
        """This and another rank's."""
        saved = {number: [*self.saved.get(number, ()), *other.saved.get(number, ())] for number in {**self.saved, **other.saved}}
        names = {**self.short, **other.short}
        short = {name: min(self.short.get(name, names[name]), other.short.get(name, names[name])) for name in names}
        return StepReport(saved, short, max(self.failed_within, other.failed_within), max(self.computed, other.computed))


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank tells the scheduler at the start: whose blocks it stores, and how many bytes each takes."""

    namespace: Namespace
    block_bytes: int


def distinct(parts: Mapping[tuple[int, int], RankFacts]) -> list[RankFacts]:
    """The ranks' facts without those that store the same, by (pipeline, tensor) rank."""
    found: dict[bytes, RankFacts] = {}
    for place in sorted(parts):
        found.setdefault(parts[place].namespace.root(), parts[place])
    return list(found.values())
