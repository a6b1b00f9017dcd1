"""Lanes: transfers side by side that never wait for one another in a circle."""

import threading
from functools import partial

import pytest

from kvpool.tier.ssd.disk import PAGE
from kvpool.tier.ssd.lanes import Lanes, aligned, staging

PATIENCE_S = 10.0


@pytest.mark.parametrize("count", [1, 4])
def test_write_behind_reads_that_wait_for_its_buffer_still_runs(count: int) -> None:
    """A queued write holds the buffer that reads in all read lanes wait for: it must get a lane, or both wait till their deadlines."""
    lanes = Lanes(count)
    held = [lanes.take(0.0) for _ in range(lanes.stages)]
    assert lanes.take(0.0) is None
    waiting = threading.Semaphore(0)

    def read(_: int) -> bool:
        waiting.release()
        stage = lanes.take(PATIENCE_S)
        if stage is not None:
            lanes.give(stage)
        return stage is not None

    answers: list[bool] = []
    reader = threading.Thread(target=lambda: answers.extend(lanes.each(read, range(count + 1))))
    reader.start()
    assert all(waiting.acquire(timeout=PATIENCE_S) for _ in range(count))
    for stage in held:
        assert stage is not None
        lanes.start(partial(lanes.give, stage)).result(PATIENCE_S)
    reader.join(PATIENCE_S)
    assert answers == [True] * (count + 1)
    lanes.close()


def test_no_lanes_runs_everything_here_in_order() -> None:
    """A simulation needs one thread and one order."""
    lanes = Lanes(0)
    seen: list[int] = []
    here = threading.get_ident()

    def note(number: int) -> int:
        assert threading.get_ident() == here
        seen.append(number)
        return -number

    assert lanes.each(note, [3, 1, 2]) == [-3, -1, -2]
    assert lanes.start(lambda: note(5)).result(0) == -5
    assert seen == [3, 1, 2, 5]
    lanes.close()


@pytest.mark.parametrize("count", [0, 3])
def test_failure_in_one_of_many_comes_out_when_all_have_ended(count: int) -> None:
    """A caller whose buffers are in use must not get control back before the last transfer into them has ended."""
    lanes = Lanes(count)
    ended: list[int] = []

    def work(number: int) -> None:
        if number == 0:
            raise OverflowError("one of many")
        ended.append(number)

    with pytest.raises(OverflowError, match="one of many"):
        lanes.each(work, range(6))
    assert count == 0 or sorted(ended) == [1, 2, 3, 4, 5]
    lanes.close()


def test_aligned_memory_begins_at_a_page_and_is_zero() -> None:
    """What O_DIRECT asks for."""
    memory = aligned(3 * PAGE)
    assert memory.ctypes.data % PAGE == 0
    assert memory.size == 3 * PAGE
    assert not memory.any()


def test_staging_buffers_are_apart_and_begin_at_pages() -> None:
    """Two transfers in one page would mix their bytes."""
    stages = staging(3, 2 * PAGE)
    for number, stage in enumerate(stages):
        assert (stage.ctypes.data % PAGE, stage.size) == (0, 2 * PAGE)
        stage[:] = number
    assert [set(stage.tolist()) for stage in stages] == [{0}, {1}, {2}]
