"""Rates per tenant, in made-up time."""

from hypothesis import given
from hypothesis import strategies as st

from kvpool.policy.rates import Bucket, Rates, TenantLimits
from kvpool.units import SECOND


def test_calls_above_the_rate_wait_and_then_go_on() -> None:
    """A burst of a second's worth, then one every tenth of a second."""
    rates = Rates(lambda tenant: TenantLimits(requests_per_s=10))
    assert [rates.admit("a", 0) for _ in range(10)] == [0] * 10
    wait_ns = rates.admit("a", 0)
    assert 0 < wait_ns <= SECOND // 10 + 1
    assert rates.admit("a", wait_ns) == 0
    assert rates.admit("a", wait_ns) > 0
    assert rates.admit("b", 0) == 0


def test_bytes_are_paid_afterwards_and_a_debt_holds_calls_back() -> None:
    """A large call goes through whole; the next waits until it is paid."""
    rates = Rates(lambda tenant: TenantLimits(bytes_per_s=100))
    assert rates.admit("a", 0) == 0
    rates.paid("a", 1000, 0)
    wait_ns = rates.admit("a", 0)
    assert 9 * SECOND <= wait_ns <= 9 * SECOND + 1
    assert rates.admit("a", wait_ns) == 0


def test_changed_limit_counts_at_once() -> None:
    """An operator lifts a limit: nobody waits for the old one."""
    limits = {"a": TenantLimits(requests_per_s=1)}
    rates = Rates(lambda tenant: limits[tenant])
    assert rates.admit("a", 0) == 0
    assert rates.admit("a", 0) > 0
    limits["a"] = TenantLimits()
    assert [rates.admit("a", 0) for _ in range(100)] == [0] * 100


@given(st.floats(0.1, 1e6), st.lists(st.tuples(st.integers(0, SECOND), st.floats(0, 1e5)), max_size=50))
def test_never_more_than_the_rate_the_burst_and_one_call(per_s: float, steps: list[tuple[int, float]]) -> None:
    """Whatever is asked when: what got through is bounded."""
    bucket, now_ns, taken, largest = Bucket(per_s, 0), 0, 0.0, 0.0
    for passed_ns, amount in steps:
        now_ns += passed_ns
        if not bucket.wait_ns(now_ns):
            bucket.take(amount, now_ns)
            taken, largest = taken + amount, max(largest, amount)
    assert taken <= bucket.burst + per_s * now_ns / SECOND + largest + 1e-6 * (1 + taken)


def test_clock_that_goes_back_gives_nothing() -> None:
    """Nor does it take."""
    bucket = Bucket(1, 10 * SECOND)
    bucket.take(1, 10 * SECOND)
    assert bucket.wait_ns(5 * SECOND) > 0
    assert bucket.wait_ns(12 * SECOND) == 0
