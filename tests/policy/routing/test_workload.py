"""Waits by the order in which a worker computes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.policy.routing import WorkerOrder
from kvpool.policy.routing.workload import Workload
from kvpool.units import SECOND


def loaded(order: WorkerOrder, *seconds: float) -> Workload:
    load = Workload(order)
    for number, each in enumerate(seconds):
        load.add(str(number), each, 0)
    return load


def test_newcomer_waits_by_the_order() -> None:
    """2, 10 and 4 s are there; one of 4 s comes: by hand, from the table of workload.py."""
    assert loaded(WorkerOrder.ARRIVAL, 2, 10, 4).wait_s(4, 0) == pytest.approx((16, 0))
    assert loaded(WorkerOrder.SHORTEST, 2, 10, 4).wait_s(4, 0) == pytest.approx((6, 4))


def test_time_works_off_by_the_order() -> None:
    """After 3 s: the first is through and one second of the next; or the shortest, and one second of the next shortest."""
    assert loaded(WorkerOrder.ARRIVAL, 2, 10, 4).wait_s(100, 3 * SECOND)[0] == pytest.approx(13)
    assert loaded(WorkerOrder.SHORTEST, 2, 10, 4).wait_s(4, 3 * SECOND) == pytest.approx((3, 4))


def test_age_counts_as_in_the_engine() -> None:
    """A place is what is left plus AGING of the arrival: after 100 s one of 10 s passes no more what had 11 s left when it came."""
    load = loaded(WorkerOrder.SHORTEST, 200, 11)
    load.add("first", 100, 0)
    assert load.wait_s(99.5, 0) == pytest.approx((11, 99.5 * 2))
    assert load.wait_s(99.5, 50 * SECOND) == pytest.approx((61, 99.5))


def test_who_should_be_through_weighs_nothing_and_takes_nothing_off() -> None:
    """One of 1 s is long overdue beside one of 100 s, of which 49 are left: one of 20 s meets nothing but, by arrival, those 49."""
    for order, waits in ((WorkerOrder.SHORTEST, 0), (WorkerOrder.ARRIVAL, 49)):
        load = loaded(order, 1, 100)
        assert load.wait_s(20, 52 * SECOND)[0] == pytest.approx(waits)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(list(WorkerOrder)),
    st.lists(st.tuples(st.sampled_from("ar"), st.integers(0, 9), st.floats(0, 20), st.floats(0, 5)), max_size=40),
    st.floats(0, 20),
)
def test_waits_stay_between_nothing_and_all_the_work(
    order: WorkerOrder, steps: list[tuple[str, int, float, float]], seconds: float
) -> None:
    """Whatever comes and goes: nobody waits less than nothing or for more than was ever given."""
    load, now, given_s, there = Workload(order), 0, 0.0, set[str]()
    for kind, number, amount, passed in steps:
        now += int(passed * SECOND)
        name = str(number)
        if kind == "a" and name not in there:
            load.add(name, amount, now)
            there.add(name)
            given_s += amount
        elif kind == "r":
            load.remove(name, now)
            there.discard(name)
        wait, others = load.wait_s(seconds, now)
        assert -1e-6 <= wait <= given_s + 1e-6
        assert -1e-6 <= others <= len(there) * seconds + 1e-6
        assert len(load) == len(there)
    load.wait_s(1.0, now + int(1000 * SECOND))
    assert load.wait_s(5.0, now + int(1000 * SECOND))[0] == pytest.approx(0, abs=1e-6)
