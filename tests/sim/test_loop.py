"""Virtual time."""

from kvpool.testing.sim.loop import Loop


def test_loop_events_of_one_time_run_in_order_of_scheduling() -> None:
    """The order of equal times must not depend on anything but the program."""
    loop, ran = Loop(), list[int]()
    for number in (3, 1, 2):
        loop.at(10, ran.append, number)
    loop.at(5, ran.append, 0)
    assert not loop.run(events=100)
    assert (ran, loop.now_ns, loop.events) == ([0, 3, 1, 2], 10, 4)


def test_loop_past_time_runs_now_and_never_goes_back() -> None:
    """Time is monotonic: a late schedule can't make it go back."""
    loop, seen = Loop(), list[int]()
    loop.at(10, loop.at, 3, lambda: seen.append(loop.now_ns))
    loop.run(events=100)
    assert seen == [10]


def test_loop_stops_at_events_or_time_and_goes_on_later() -> None:
    """A phase ends by its budget; what is left runs in the next phase."""
    loop, ran = Loop(), list[int]()
    for number in range(6):
        loop.at(number * 10, ran.append, number)
    assert loop.run(events=2)
    assert loop.run(events=100, until_ns=30)
    assert ran == [0, 1, 2, 3]
    assert not loop.run(events=100)


def test_loop_stale_events_are_not_counted() -> None:
    """A timer without a reason is no event: rates must not look better for it."""
    loop = Loop()
    loop.at(1, loop.stale)
    loop.at(2, list[int]().append, 1)
    loop.run(events=100)
    assert loop.events == 1
