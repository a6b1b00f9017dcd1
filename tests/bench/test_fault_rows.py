"""The judge of the fault bench: what a row counts, and that each demand can be missed."""

from dataclasses import replace

import pytest

from bench.fault_rows import Row, balanced, between, p99_ms, row
from kvpool.testing.load import Done

LEASE_S = 3.0


def done(at_ns: int = 0, *, ms: float = 1, chain: int = 0, hit: int = 10, total: int = 10, wrong: int = 0, error: str = "") -> Done:
    return Done(at_ns, int(ms * 1000), chain, hit, total, wrong, error)


def good() -> Row:
    return row("a fault", [done()], [done()], copies=2, concerns=lambda chain: False, lost_blocks=lambda chain: 0, settle_s=5.9)


def test_between_takes_what_began_in_the_span() -> None:
    """A request that began before the fault is not charged to it."""
    assert [one.at_ns for one in between([done(1), done(2), done(3), done(4)], 2, 4)] == [2, 3]


def test_p99_is_the_time_that_99_of_100_took_at_most() -> None:
    """And of no request there is none, rather than a perfect 0."""
    assert p99_ms([done(ms=number) for number in range(100, 0, -1)]) == 100.0
    assert p99_ms([done(ms=number) for number in range(1, 201)]) == 199.0
    assert p99_ms([]) is None


def test_row_counts_both_spans_and_sets_apart_who_is_concerned() -> None:
    """Chain 1 has a copy on the node in trouble, and 4 of its 20 blocks nowhere else."""
    before = [done(ms=2, total=20, hit=20), done(ms=8, chain=1, total=20, hit=20, wrong=2)]
    during = [done(ms=3, total=20, hit=20, error="late"), done(ms=900, chain=1, total=20, hit=16), done(ms=30, chain=1, total=20, hit=16)]
    found = row("a fault", before, during, copies=1, concerns=lambda chain: chain == 1, lost_blocks=lambda chain: 4 * chain, settle_s=None)
    assert (found.requests_before, found.requests, found.failed, found.wrong) == (2, 3, 1, 2)
    assert found.hit_before == 1.0
    assert found.loss == pytest.approx(8 / 60)
    assert found.dead_share == pytest.approx(8 / 60)
    assert (found.p99_before_ms, found.p99_during_ms, found.all_p99_ms) == (2.0, 3.0, 900.0)
    assert found.untouched_p99_ratio == 1.5
    assert found.unmet(LEASE_S) == ["wrong bytes", "failed requests"]


def test_row_without_anybody_untouched_has_nothing_to_compare() -> None:
    """When all nodes are restarted in turn, every request may notice."""
    found = row("a fault", [done()], [done(ms=50)], copies=2, concerns=lambda chain: True, lost_blocks=lambda chain: 0, settle_s=None)
    assert found.untouched_p99_ratio is None
    assert found.unmet(LEASE_S) == []


@pytest.mark.parametrize(
    ("missed", "change"),
    [
        ("no requests", {"requests": 0}),
        ("no requests", {"requests_before": 0}),
        ("wrong bytes", {"wrong": 1}),
        ("failed requests", {"failed": 1}),
        ("hits lost", {"hit_during": 0.999}),
        ("untouched p99", {"p99_during_ms": 1.51}),
        ("settled late", {"settle_s": 6.01}),
        ("moved too much", {"moved_share": 0.19, "fair_share": 1 / 6}),
        ("books", {"balanced": False}),
    ],
)
def test_each_demand_is_missed_by_a_row_that_breaks_only_that(missed: str, change: dict[str, float]) -> None:
    """A judge that can't say no proves nothing."""
    assert good().unmet(LEASE_S) == []
    assert replace(good(), **change).unmet(LEASE_S) == [missed]  # type: ignore[arg-type]


def test_demands_hold_at_their_limits() -> None:
    """1.5 times, two leases, a share and 2 %, and no more hits lost than had no copy left."""
    edge = replace(
        good(), hit_during=0.9, dead_share=0.1, p99_during_ms=1.5, settle_s=6.0, moved_share=0.1866, fair_share=1 / 6, balanced=True
    )
    assert edge.unmet(LEASE_S) == []


def book(free: int = 6, used: int = 4, pinned: int = 0, read: int = 0, write: int = 0) -> dict[str, int]:
    return {
        "capacity_bytes": 10,
        "free_bytes": free,
        "used_bytes": used,
        "pinned_bytes": pinned,
        "read_leases": read,
        "write_leases": write,
    }


def test_books_add_up_at_any_time_and_hold_nothing_at_rest() -> None:
    """A lease or a pin is fine while clients work, and a leak when they are gone; no node that answers is no proof."""
    assert balanced([book(), book(free=5, used=3, pinned=2, read=1)], idle=False)
    assert not balanced([book(), book(free=5)], idle=False)
    assert balanced([book(), book()], idle=True)
    for held in (book(read=1), book(write=1), book(free=5, pinned=1)):
        assert not balanced([book(), held], idle=True)
    assert not balanced([], idle=False)
