"""Priority, ttl and temporal: the order each is named for."""

import pytest

from kvpool.policy.eviction import NEVER_NS, EvictionPolicy, make_policy
from kvpool.testing.policy_kit import drain, insert_chain, key

NAMES = list("abcdef")


def put(policy: EvictionPolicy, name: str, **others: int) -> None:
    insert_chain(policy, [name], **others)  # type: ignore[arg-type]


def test_priority_lowest_leaves_first_and_the_older_of_equals() -> None:
    """What the caller asked for, then recency."""
    policy = make_policy("priority")
    for name, priority in zip("abcde", (100, 50, 0, 50, 35), strict=True):
        put(policy, name, priority=priority)
    policy.touched(key("b"), 1)
    assert drain(policy, NAMES) == ["c", "e", "d", "b", "a"]


def test_priority_past_its_time_counts_as_default_in_order_of_use() -> None:
    """A raised block falls back among the others by its last use, not to the end of the queue."""
    policy = make_policy("priority")
    put(policy, "a", now_ns=0, priority=90, priority_until_ns=10)
    put(policy, "b", now_ns=1)
    put(policy, "c", now_ns=2, priority=90)
    put(policy, "d", now_ns=3)
    assert drain(policy, NAMES, limit=1) == ["b"]
    policy.touched(key("d"), 10)
    assert drain(policy, NAMES) == ["a", "d", "c"]


def test_priority_lowered_for_a_while_rises_again() -> None:
    """The default is where every priority returns to, from below as well."""
    policy = make_policy("priority")
    put(policy, "a", now_ns=0, priority=10, priority_until_ns=10)
    put(policy, "b", now_ns=1, priority=49)
    policy.touched(key("never there"), 11)
    assert drain(policy, NAMES) == ["b", "a"]


@pytest.mark.parametrize(("until_ns", "first"), [(5, "a"), (NEVER_NS, "b")])
def test_priority_that_ended_before_the_arrival_is_none(until_ns: int, first: str) -> None:
    """A commit may come later than the duration that was asked for."""
    policy = make_policy("priority")
    put(policy, "a", now_ns=6, priority=90, priority_until_ns=until_ns)
    put(policy, "b", now_ns=6)
    assert drain(policy, NAMES, limit=1) == [first]


def test_ttl_soonest_to_expire_leaves_first_and_the_rest_by_use() -> None:
    """What will be gone anyway makes room for what won't."""
    policy = make_policy("ttl")
    put(policy, "a")
    put(policy, "b", expires_ns=90)
    put(policy, "c", expires_ns=30)
    put(policy, "d")
    for name in ("b", "a"):
        policy.touched(key(name), 20)
    assert drain(policy, NAMES) == ["c", "b", "d", "a"]


def test_temporal_oldest_tokens_leave_first_whatever_is_read() -> None:
    """The fast tier keeps the recent end: older arrivals first, and heads before tails within one."""
    policy = make_policy("temporal")
    for name, depth in (("c", 32), ("b", 16), ("a", 0)):
        put(policy, name, now_ns=1, depth=depth)
    put(policy, "d", now_ns=2, depth=0)
    policy.touched(key("a"), 3, 100)
    assert drain(policy, NAMES) == ["a", "b", "c", "d"]
