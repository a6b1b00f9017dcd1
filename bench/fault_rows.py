"""What a fault did to the requests around it: one row of `bench.faults`, computed from what clients wrote down, and judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpool.testing.load import Done

P99_RATIO = 1.5
SETTLE_LEASES = 2
MOVED_MORE = 0.02
_EXACT = 1e-9  # rates are quotients; equal ones may differ by a rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault. Shares are of blocks; times in milliseconds but for `settle_s`.

    `requests_before`, `requests`: how many began before and during it; `failed`, `wrong`: of both. `dead_share`: the part of the blocks
    wanted during the fault whose copies are all out of reach. `p99_before_ms`, `p99_during_ms`: p99 of loading, of requests that don't
    concern a node in trouble; None when all do. `all_p99_ms`: of all requests during the fault. `settle_s`: until the view had changed;
    None when it need not.

    Of a join: `moved_share`, the part of all copies that the newcomer holds, and `fair_share`, its part of the nodes. Of a join and a
    drain: `balanced`, whether the books of all nodes add up; their p99 is not judged, for nothing is in trouble.
    """

    fault: str
    copies: int
    requests_before: int
    requests: int
    failed: int
    wrong: int
    hit_before: float
    hit_during: float
    dead_share: float
    p99_before_ms: float | None
    p99_during_ms: float | None
    all_p99_ms: float | None
    settle_s: float | None
    moved_share: float | None = None
    fair_share: float = 0.0
    balanced: bool | None = None

    @property
    def loss(self) -> float:
        """Hit rate before less during."""
        return self.hit_before - self.hit_during

    @property
    def untouched_p99_ratio(self) -> float | None:
        """1 when nobody else noticed; None when there is nothing to compare."""
        if self.p99_before_ms is None or self.p99_during_ms is None:
            return None
        return self.p99_during_ms / self.p99_before_ms

    def unmet(self, lease_s: float) -> list[str]:
        """What was asked of the row and isn't so, each as a few words; empty when all is well."""
        ratio = self.untouched_p99_ratio
        kept = {
            "no requests": min(self.requests_before, self.requests) > 0,
            "wrong bytes": self.wrong == 0,
            "failed requests": self.failed == 0,
            "hits lost": self.loss <= self.dead_share + _EXACT,
            "untouched p99": ratio is None or self.balanced is not None or ratio <= P99_RATIO,
            "settled late": self.settle_s is None or self.settle_s <= SETTLE_LEASES * lease_s,
            "moved too much": self.moved_share is None or self.moved_share <= self.fair_share + MOVED_MORE,
            "books": self.balanced is not False,
        }
        return [demand for demand, holds in kept.items() if not holds]


def between(done: Sequence[Done], start_ns: int, end_ns: int) -> list[Done]:
    """Requests that began in a span of time."""
    return [one for one in done if start_ns <= one.at_ns < end_ns]


def hit_rate(done: Sequence[Done]) -> float:
    """Blocks found, of those wanted."""
    return sum(one.hit for one in done) / max(1, sum(one.total for one in done))


def p99_ms(done: Sequence[Done]) -> float | None:
    """The time that 99 of 100 loads took at most; None when there was none."""
    times = sorted(one.load_us for one in done)
    return times[min(len(times) - 1, len(times) * 99 // 100)] / 1000 if times else None


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
    """The row of one fault. `concerns(chain)`: whether a prompt has copies on a node in trouble; `lost_blocks(chain)`: how many of its
    blocks have no copy elsewhere."""
    untouched = [[one for one in part if not concerns(one.chain)] for part in (before, during)]
    return Row(
        fault=fault,
        copies=copies,
        requests_before=len(before),
        requests=len(during),
        failed=sum(bool(one.error) for one in (*before, *during)),
        wrong=sum(one.wrong for one in (*before, *during)),
        hit_before=hit_rate(before),
        hit_during=hit_rate(during),
        dead_share=sum(lost_blocks(one.chain) for one in during) / max(1, sum(one.total for one in during)),
        p99_before_ms=p99_ms(untouched[0]),
        p99_during_ms=p99_ms(untouched[1]),
        all_p99_ms=p99_ms(during),
        settle_s=settle_s,
    )


def balanced(books: Sequence[dict[str, int]], *, idle: bool) -> bool:
    """Whether every node's bytes add up; of an `idle` cluster also whether nothing is leased or pinned."""
    held = ("read_leases", "write_leases", "pinned_bytes")
    adds_up = all(book["free_bytes"] + book["used_bytes"] + book["pinned_bytes"] == book["capacity_bytes"] for book in books)
    return bool(books) and adds_up and not (idle and any(book[name] for book in books for name in held))
