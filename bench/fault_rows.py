"""What a fault did to the requests around it: one row of `bench.faults`, computed from what clients wrote down."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.testing.load import Done


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault. Shares are of blocks; times in milliseconds but for `settle_s`.

    `dead_share`: the part of the blocks wanted during the fault whose copies are all out of reach. `loss`: by how much the hit rate fell.
    `untouched_p99_ratio`: p99 of loading, of requests that don't concern the node in trouble, during / before. `settle_s`: until the view
    had changed (None: it need not).
    """

    fault: str
    copies: int
    requests: int
    failed: int
    wrong: int
    hit_before: float
    hit_during: float
    dead_share: float
    p99_before_ms: float
    p99_during_ms: float
    settle_s: float | None

    @property
    def loss(self) -> float:
        """Hit rate before less during."""
        return self.hit_before - self.hit_during

    @property
    def untouched_p99_ratio(self) -> float:
        """1 when nobody else noticed."""
        return self.p99_during_ms / self.p99_before_ms


def between(done: Sequence[Done], start_ns: int, end_ns: int) -> list[Done]:
    """Requests that began in a span of time."""
    return [one for one in done if start_ns <= one.at_ns < end_ns]


def hit_rate(done: Sequence[Done]) -> float:
    """Blocks found, of those wanted."""
    return sum(one.hit for one in done) / max(1, sum(one.total for one in done))


def p99_ms(done: Sequence[Done]) -> float:
    """The time that 99 of 100 loads took at most."""
    times = sorted(one.load_us for one in done)
    return times[min(len(times) - 1, len(times) * 99 // 100)] / 1000 if times else 0.0


def row(
    fault: str,
    before: Sequence[Done],
    during: Sequence[Done],
    *,
    copies: int,
    concerns: Callable[[int], bool],
    lost_blocks: Callable[[int], int],
    settle_s: float | None,
) -> Row:
    """The row of one fault. `concerns(chain)`: whether a prompt has copies on the node in trouble; `lost_blocks(chain)`: how many of its
    blocks have no copy elsewhere."""
    untouched = [[one for one in part if not concerns(one.chain)] for part in (before, during)]
    return Row(
        fault=fault,
        copies=copies,
        requests=len(during),
        failed=sum(bool(one.error) for one in (*before, *during)),
        wrong=sum(one.wrong for one in (*before, *during)),
        hit_before=hit_rate(before),
        hit_during=hit_rate(during),
        dead_share=sum(lost_blocks(one.chain) for one in during) / max(1, sum(one.total for one in during)),
        p99_before_ms=p99_ms(untouched[0]),
        p99_during_ms=p99_ms(untouched[1]),
        settle_s=settle_s,
    )
