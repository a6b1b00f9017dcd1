"""Deadlines: order, changes, bounded size."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool.pool.deadlines import NEVER_NS, Deadlines


def test_deadlines_pop_in_order_of_time_then_name() -> None:
    """Ends happen in one order on every run."""
    deadlines: Deadlines[int] = Deadlines()
    for name, at in ((3, 10), (1, 20), (2, 10)):
        deadlines.set(name, at)
    assert [deadlines.pop_due(20) for _ in range(4)] == [2, 3, 1, None]


def test_deadlines_not_due_yet_stays() -> None:
    """Due means at or before now."""
    deadlines: Deadlines[int] = Deadlines()
    deadlines.set(1, 10)
    assert (deadlines.pop_due(9), len(deadlines), deadlines.pop_due(10), len(deadlines)) == (None, 1, 1, 0)


def test_deadlines_changed_and_dropped_forget_the_old_time() -> None:
    """A renewed lease must not end at its first deadline, a released one not at all."""
    deadlines: Deadlines[int] = Deadlines()
    deadlines.set(1, 10)
    deadlines.set(1, 30)
    deadlines.set(2, 20)
    deadlines.drop(2)
    deadlines.drop(99)
    assert (deadlines.first_ns(), deadlines.pop_due(29), deadlines.pop_due(30), deadlines.first_ns()) == (30, None, 1, NEVER_NS)


def test_deadlines_many_renewals_stay_bounded() -> None:
    """A lease renewed for days must not grow the heap."""
    deadlines: Deadlines[int] = Deadlines()
    for at in range(10_000):
        deadlines.set(at % 10, at)
    assert len(deadlines) == 10
    assert len(deadlines._heap) <= 2 * 10 + 65


@given(st.lists(st.tuples(st.sampled_from("sdp"), st.integers(0, 5), st.integers(0, 50)), max_size=200))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_deadlines_any_history_equals_a_plain_dict(history: list[tuple[str, int, int]]) -> None:
    """The heap with stale entries behaves like a sorted dict."""
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for action, name, at in history:
        if action == "s":
            deadlines.set(name, at)
            model[name] = at
        elif action == "d":
            deadlines.drop(name)
            model.pop(name, None)
        else:
            due = min(((deadline, n) for n, deadline in model.items() if deadline <= at), default=None)
            assert deadlines.pop_due(at) == (due[1] if due else None)
            if due:
                del model[due[1]]
        assert deadlines.first_ns() == min(model.values(), default=NEVER_NS)
        assert [deadlines.get(n) for n in range(6)] == [model.get(n) for n in range(6)]
