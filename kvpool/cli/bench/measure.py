"""Cases that take turns: each runs for a slice of its time, then the next one, some times over; so a machine's drift meets all alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.cli.bench.cpu import cpu_s_of, own_cpu_s
from kvpool.units import GIB, SECOND

SLICES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure: `run(i)` moves `batch` buffers of `size` bytes; it is called with 0, 1, 2 and so on.

    A slice has at most `most` runs; before it, untimed, `prepare` hears which may come, and after it there is `finish`. `servers`: the
    processes that take part, where they are known.
    """

    way: str
    op: str
    size: int
    batch: int
    run: Callable[[int], object]
    prepare: Callable[[range], object] = lambda coming: None
    finish: Callable[[], object] = lambda: None
    most: int = 1_000_000
    servers: tuple[int, ...] = ()


@dataclass(slots=True)
class Measured:
    """What came of a case, over all its slices."""

    case: Case
    seconds: list[float] = field(default_factory=list)
    client_cpu_s: float = 0.0
    server_cpu_s: float = 0.0

    def percentile_us(self, share: float) -> float:
        """The time that `share` of the runs took at most, in microseconds."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(len(self.seconds) * share))] * 1e6

    @property
    def gbps(self) -> float:
        """Bytes by the time that they took, in GB/s."""
        return self._bytes / sum(self.seconds) / 1e9

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        case = self.case
        return {
            "way": case.way,
            "op": case.op,
            "size": case.size,
            "batch": case.batch,
            "runs": len(self.seconds),
            **{f"p{share}_us": self.percentile_us(share / 100) for share in (50, 90, 99)},
            "gbps": self.gbps,
            "client_cpu_s_per_gib": self.client_cpu_s / (self._bytes / GIB),
            "server_cpu_s_per_gib": self.server_cpu_s / (self._bytes / GIB) if case.servers else None,
        }

    @property
    def _bytes(self) -> int:
        return len(self.seconds) * self.case.size * self.case.batch


def take_turns(cases: Sequence[Case], seconds: float) -> list[Measured]:
    """Run each case for about `seconds`, in `SLICES`. The first run of each slice warms up, uncounted."""
    found = [Measured(case) for case in cases]
    runs = [0] * len(cases)
    for _ in range(SLICES):
        for index, one in enumerate(found):
            runs[index] = _slice(one, runs[index], int(seconds / SLICES * SECOND))
    return found


def _slice(one: Measured, number: int, length_ns: int) -> int:
    """One slice, from run `number` on; the number of the next run."""
    case, coming = one.case, range(number, number + 1 + one.case.most)
    case.prepare(coming)
    case.run(number)
    client, server, end_ns = own_cpu_s(), cpu_s_of(case.servers), time.monotonic_ns() + length_ns
    for number in coming[1:]:
        begun = time.perf_counter()
        case.run(number)
        one.seconds.append(time.perf_counter() - begun)
        if time.monotonic_ns() >= end_ns:
            break
    one.client_cpu_s += own_cpu_s() - client
    one.server_cpu_s += cpu_s_of(case.servers) - server
    case.finish()
    return number + 1
