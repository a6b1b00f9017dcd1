"""The publish protocol where caches are not kept alike: sound over many orders of events, and each missing step noticed."""

import random

import numpy as np
import pytest

from kvpool.errors import ClosedError, ConfigError
from kvpool.testing.noncoherent import NonCoherentShim, memory_of
from kvpool.testing.sharing import DEFECTS, Trial, seeds_to_catch
from kvpool.testing.tier_kit import data_of
from kvpool.testing.turns import Turns

SEEDS = 12
CAUGHT_WITHIN = dict.fromkeys(DEFECTS, 4) | {"start not announced": 20}


def views(whim: float = 0.0) -> tuple[NonCoherentShim, NonCoherentShim]:
    """Two views of one memory."""
    memory = memory_of(1024)
    return NonCoherentShim(memory, random.Random(1), whim=whim), NonCoherentShim(memory, random.Random(2), whim=whim)


def seen_by(view: NonCoherentShim, offset: int, length: int) -> list[int]:
    """What a view reads."""
    into = np.zeros(length, np.uint8)
    view.read(offset, into)
    return into.tolist()


def test_trials_of_the_sound_protocol_show_nothing() -> None:
    """Owners that crash in the middle of anything, readers in the middle of everything; and the trial is not idle."""
    trials = [Trial(seed).run() for seed in range(SEEDS)]
    assert [+trial.violations for trial in trials] == [{}] * SEEDS
    assert sum(trial.hits for trial in trials) > 100
    assert sum(trial.crashes for trial in trials) > 5


@pytest.mark.parametrize("defect", DEFECTS)
def test_trial_with_a_step_left_out_notices(defect: str) -> None:
    """A model that can't tell the broken protocol from the sound one proves nothing."""
    assert seeds_to_catch(defect, CAUGHT_WITHIN[defect]) is not None


def test_same_seed_repeats_a_trial() -> None:
    """A violation must be found again."""
    first, second = (Trial(3, "payload not flushed").run() for _ in range(2))
    assert (first.violations, first.hits, first.crashes) == (second.violations, second.hits, second.crashes)


def test_write_unseen_until_flushed_and_read_remembered_until_invalidated() -> None:
    """The two halves of the model."""
    mine, theirs = views()
    assert seen_by(theirs, 60, 8) == [0] * 8
    mine.write(60, np.full(8, 5, np.uint8))
    assert seen_by(mine, 59, 10) == [0, *[5] * 8, 0]
    theirs.invalidate(0, 1024)
    assert seen_by(theirs, 60, 8) == [0] * 8
    mine.flush(60, 1)
    assert seen_by(theirs, 60, 8) == [0] * 8
    theirs.invalidate(63, 1)
    assert seen_by(theirs, 60, 8) == [5, 5, 5, 5, 0, 0, 0, 0]
    mine.flush(0, 1024)
    theirs.invalidate(0, 1024)
    assert seen_by(theirs, 60, 8) == [5] * 8


def test_lines_leave_come_and_tear_by_themselves_and_nothing_written_is_lost() -> None:
    """A cache's whims may show a write early, also half of it, but never take it back."""
    mine, theirs = views(whim=0.3)
    early = torn = 0
    for turn in range(1, 200):
        mine.write(0, np.full(64, turn, np.uint8))
        assert seen_by(mine, 0, 64) == [turn] * 64
        theirs.invalidate(0, 64)
        seen = set(seen_by(theirs, 0, 64))
        early, torn = early + (seen == {turn}), torn + (len(seen) > 1)
    assert early > 0
    assert torn > 0
    mine.write(100, data_of(1, 500))
    mine.flush(100, 500)
    theirs.invalidate(100, 500)
    assert seen_by(theirs, 100, 500) == data_of(1, 500).tolist()


def test_crashed_view_writes_nothing_more() -> None:
    """Some of what was not flushed is lost, and the view is of no use any more."""
    mine, theirs = views()
    mine.write(0, np.full(1024, 7, np.uint8))
    mine.crash()
    assert set(seen_by(theirs, 0, 1024)) == {0, 7}
    for call in (lambda: seen_by(mine, 0, 1), lambda: mine.flush(0, 1)):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ConfigError, match="outside"):
        theirs.invalidate(1000, 100)


def test_turns_interleave_by_seed_and_hand_on_failures() -> None:
    """The order is the seed's; a failure in one thread fails the test, and the others end."""

    def order(seed: int) -> str:
        turns, said = Turns(random.Random(seed)), list[str]()

        def work(name: str) -> None:
            for _ in range(20):
                said.append(name)
                turns.turn()

        turns.run([lambda: work("a"), lambda: work("b")])
        turns.turn()
        return "".join(said)

    assert order(1) == order(1) != order(2)
    assert order(1) not in ("a" * 20 + "b" * 20, "b" * 20 + "a" * 20)
    turns = Turns(random.Random(1))
    with pytest.raises(ZeroDivisionError):
        turns.run([lambda: turns.turn(), lambda: print(1 // 0)])
