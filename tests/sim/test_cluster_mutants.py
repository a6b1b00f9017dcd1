"""The tests of the tests: every defect of a cluster that is made on purpose is noticed within its stated number of seeds."""

import pytest

from kvpool.policy import placement
from kvpool.testing.sim.cluster import run_cluster
from kvpool.testing.sim.cluster.mutants import CLUSTER_MUTANTS, NODES, ClusterMutant

EVENTS = 1000


@pytest.mark.parametrize("mutant", CLUSTER_MUTANTS, ids=lambda mutant: mutant.name)
def test_cluster_mutant_dies_within_its_seeds(mutant: ClusterMutant) -> None:
    """A checker that misses a defect is no checker."""
    verdict = mutant.hunt(EVENTS)
    assert verdict is not None
    assert verdict.violation


def test_cluster_mutants_are_many_named_once_and_undone() -> None:
    """A mutant that stayed would make liars of all later tests."""
    assert len(CLUSTER_MUTANTS) >= 8
    assert len({mutant.name for mutant in CLUSTER_MUTANTS}) == len(CLUSTER_MUTANTS)
    before = placement._Table.place
    with CLUSTER_MUTANTS[0].applied():
        assert placement._Table.place is not before
    assert placement._Table.place is before
    assert run_cluster(0, 200, NODES).violation == ""
