"""Two threads at one list of blocks: each block once, nothing goes on after the end, errors come out."""

import os
import threading
import time

import pytest

from kvpool import cores
from kvpool.client import company
from kvpool.client.company import WORTH_BYTES, each


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core has nothing to do, however busy the machine is that runs these tests."""
    monkeypatch.setattr(cores, "spare", lambda: True)


@pytest.mark.parametrize("nbytes", [0, WORTH_BYTES])
@pytest.mark.parametrize("count", [0, 1, 2, 33])
def test_each_number_comes_once(count: int, nbytes: int) -> None:
    """Whether there is help or not."""
    done: list[int] = []

    def step(number: int) -> bool:
        time.sleep(0.001)
        done.append(number)
        return True

    each(count, nbytes, step)
    assert sorted(done) == list(range(count))


def test_large_work_is_shared_and_small_work_is_not() -> None:
    """A second thread takes part when both can work at once."""

    def threads(nbytes: int) -> set[str]:
        names: set[str] = set()

        def step(number: int) -> bool:
            names.add(threading.current_thread().name)
            time.sleep(0.005)
            return True

        each(20, nbytes, step)
        return names

    assert len(threads(WORTH_BYTES)) == (2 if len(os.sched_getaffinity(0)) > 1 else 1)
    assert len(threads(WORTH_BYTES - 1)) == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_the_second_thread_runs_on_another_core() -> None:
    """Woken on the core of who asks it would take turns with it."""

    def step(number: int) -> bool:
        time.sleep(0.005)
        return True

    deadline = time.monotonic() + 20
    while not (company._helpers and company._helpers[0].id) and time.monotonic() < deadline:
        each(4, WORTH_BYTES, step)
    each(4, WORTH_BYTES, step)
    ours, theirs = os.sched_getaffinity(0), os.sched_getaffinity(company._helpers[0].id)
    assert theirs < ours
    assert len(theirs) == len(ours) - 1


def test_where_no_core_is_idle_each_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread would take its time from somebody who needs it."""
    monkeypatch.setattr(cores, "spare", lambda: False)
    names: set[str] = set()

    def step(number: int) -> bool:
        names.add(threading.current_thread().name)
        time.sleep(0.002)
        return True

    each(20, WORTH_BYTES, step)
    assert names == {threading.current_thread().name}


def test_no_step_begins_after_one_said_that_it_is_over() -> None:
    """At most the one that the other thread is at."""
    done: list[int] = []

    def step(number: int) -> bool:
        done.append(number)
        return number < 3

    each(100, WORTH_BYTES, step)
    assert {0, 1, 2, 3} <= set(done)
    assert len(done) < 10


@pytest.mark.parametrize("nbytes", [0, WORTH_BYTES])
def test_error_of_either_thread_comes_out_when_both_have_ended(nbytes: int) -> None:
    """A caller may free what the steps write to."""
    running: list[int] = []

    def step(number: int) -> bool:
        running.append(number)
        time.sleep(0.002)
        running.remove(number)
        if number == 5:
            raise ValueError("five")
        return True

    with pytest.raises(ValueError, match="five"):
        each(1000, nbytes, step)
    assert running == []


def test_calls_at_the_same_time_go_alone_and_end() -> None:
    """One helper a process."""
    done: list[int] = []
    lock = threading.Lock()

    def step(number: int) -> bool:
        time.sleep(0.001)
        with lock:
            done.append(number)
        return True

    callers = [threading.Thread(target=each, args=(25, WORTH_BYTES, step)) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(30)
    assert len(done) == 100


def test_forked_child_has_a_helper_of_its_own() -> None:
    """The parent's thread doesn't exist there: work given to it would never be done."""
    each(4, WORTH_BYTES, lambda number: True)
    assert company._helpers
    child = os.fork()
    if child == 0:
        done: list[int] = []
        ok = not company._helpers
        each(8, WORTH_BYTES, lambda number: done.append(number) or True)  # type: ignore[func-returns-value]
        os._exit(0 if ok and sorted(done) == list(range(8)) else 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0
            return
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    pytest.fail("the forked child hangs")
