"""What the kernel tells of this host's cores, and threads that are kept apart."""

import os
import threading

import pytest

from kvpool import cores


def test_who_asks_is_counted_among_those_that_run() -> None:
    """So a thread that is alone on the host counts one, and a core is idle where there are two."""
    assert cores.running() >= 1


@pytest.mark.parametrize(("running", "spare"), [(0, False), (1, True), (3, True), (4, False), (9, False)])
def test_a_core_is_idle_while_fewer_run_than_there_are(monkeypatch: pytest.MonkeyPatch, running: int, spare: bool) -> None:
    """Where the kernel doesn't tell (0) none is."""
    monkeypatch.setattr(cores, "_CORES", 4)
    monkeypatch.setattr(cores, "running", lambda: running)
    assert cores.spare() is spare


@pytest.mark.parametrize(("running", "wanted"), [(0, True), (1, False), (4, False), (5, True)])
def test_a_core_is_wanted_while_more_run_than_there_are(monkeypatch: pytest.MonkeyPatch, running: int, wanted: bool) -> None:
    """Where the kernel doesn't tell (0) somebody may want it."""
    monkeypatch.setattr(cores, "_CORES", 4)
    monkeypatch.setattr(cores, "running", lambda: running)
    assert cores.wanted() is wanted


def test_who_leaves_a_core_may_use_all_as_before() -> None:
    """It is a step aside, not a bond."""
    ours = os.sched_getaffinity(0)
    cores.leave()
    assert os.sched_getaffinity(0) == ours
    assert cores.current() in {-1, *range(os.cpu_count() or 1)}


def test_a_descriptor_that_somebody_closed_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that closes all it has open may have another file behind the number: no count is taken from that."""
    reading, writing = os.pipe()
    other = os.open(os.devnull, os.O_RDONLY)
    for descriptor in (reading, other):
        monkeypatch.setattr(cores, "_files", [descriptor])
        assert cores.running() == 0
    for descriptor in (reading, writing, other):
        os.close(descriptor)


def test_a_thread_is_kept_off_the_core_of_who_asks() -> None:
    """Else both may run by turns on one core while another one is idle."""
    ready, end, ids = threading.Event(), threading.Event(), list[int]()

    def wait() -> None:
        ids.append(threading.get_native_id())
        ready.set()
        end.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert ready.wait(20)
        ours = os.sched_getaffinity(0)
        assert cores.apart(ids[0]) is (len(ours) > 1)
        if len(ours) > 1:
            theirs = os.sched_getaffinity(ids[0])
            assert theirs < ours
            assert len(theirs) == len(ours) - 1
        assert os.sched_getaffinity(0) == ours
    finally:
        end.set()
        thread.join(20)


def test_a_thread_that_has_ended_can_be_kept_anywhere() -> None:
    """Its number is nobody's: no error, whoever works beside it finds out."""
    thread = threading.Thread(target=lambda: None)
    thread.start()
    number = thread.native_id
    thread.join()
    assert number is not None
    assert cores.apart(number) is (len(os.sched_getaffinity(0)) > 1)
