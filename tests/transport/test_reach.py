"""Runs: merged without changing what moves, and checked before anything does."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.errors import ConfigError, DeadlineError
from kvpool.transport import Run, merge_runs
from kvpool.transport.reach import check_deadline, check_runs

runs = st.lists(st.builds(Run, st.integers(0, 40), st.integers(0, 9), st.integers(0, 40)), max_size=12)


@given(runs)
def test_merged_runs_move_the_same_bytes(given_runs: list[Run]) -> None:
    """Merging is an optimisation: applied in order, both lists leave the same buffer."""
    arena = np.arange(1, 65, dtype=np.uint8)
    plain, merged = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    for into, moved in ((plain, given_runs), (merged, merge_runs(given_runs))):
        for run in moved:
            into[run.at : run.at + run.length] = arena[run.offset : run.offset + run.length]
    assert np.array_equal(plain, merged)


@given(runs)
def test_merging_again_changes_nothing(given_runs: list[Run]) -> None:
    """No empty run and no adjoining pair is left."""
    once = merge_runs(given_runs)
    assert merge_runs(once) == once
    assert all(run.length for run in once)


def test_blocks_of_one_chain_become_one_run() -> None:
    """The case it is for: neighbours in the arena that go to neighbouring places."""
    assert merge_runs([Run(100, 10, 0), Run(110, 10, 10), Run(120, 0, 20), Run(120, 10, 20)]) == (Run(100, 30, 0),)
    assert merge_runs([Run(0, 4, 0), Run(4, 4, 8)]) == (Run(0, 4, 0), Run(4, 4, 8))


def test_buffer_of_the_wrong_kind_refused() -> None:
    """A reach copies raw bytes to an address; anything but plain contiguous bytes would be garbled."""
    good = np.zeros(16, np.uint8)
    readonly = good.view()
    readonly.flags.writeable = False
    for bad in (good.view(np.int8), good.reshape(4, 4), good[::2]):
        with pytest.raises(ConfigError, match="contiguous 1-D array of uint8"):
            check_runs([], 16, bad, writable=False)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="read-only"):
        check_runs([], 16, readonly, writable=True)
    check_runs([Run(0, 16, 0)], 16, readonly, writable=False)


def test_deadline_is_over_exactly_when_it_has_come() -> None:
    """At the deadline it is too late."""
    with pytest.raises(DeadlineError):
        check_deadline(time.monotonic_ns())
    check_deadline(time.monotonic_ns() + 10**12)
