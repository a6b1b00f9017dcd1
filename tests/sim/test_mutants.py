"""The tests of the tests: every defect made on purpose is noticed within its stated number of seeds."""

import pytest

from kvpool.pool import PoolState
from kvpool.testing.sim import run_seed
from kvpool.testing.sim.mutant import Mutant
from kvpool.testing.sim.mutants import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_dies_within_its_seeds(mutant: Mutant) -> None:
    """A checker that misses a defect is no checker."""
    verdict = mutant.hunt(2000)
    assert verdict is not None
    assert verdict.violation


def test_mutants_are_many_named_once_and_undone() -> None:
    """A mutant that stayed would make liars of all later tests."""
    assert len(MUTANTS) >= 16
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    before = PoolState.commit
    assert MUTANTS[0].hunt(2000) is not None
    assert PoolState.commit is before
    assert run_seed(0, 2000).violation == ""
