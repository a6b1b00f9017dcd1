"""Whole clusters: the fixed budget of seeds holds, reaches every dangerous situation, and is a function of the seed alone."""

import json
import logging
import subprocess
import sys
import time
from functools import cache

from kvpool.testing.sim import Verdict
from kvpool.testing.sim.cluster import CLUSTER_MARKS, draw_cluster, run_cluster
from kvpool.testing.sim.marks import Coverage

SEEDS, EVENTS, NODES = 30, 700, 5


@cache
def verdicts() -> tuple[Verdict, ...]:
    return tuple(run_cluster(seed, EVENTS, NODES) for seed in range(SEEDS))


def digest_of(hash_seed: str) -> str:
    command = [sys.executable, "-m", "kvpool.testing.sim", "--nodes", "4", "--seeds", "3", "--events", "400", "--json"]
    done = subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["violations"] == 0
    assert answer["seconds"] > 0
    assert answer["events_per_s"] > 0
    return str(answer["digest"])


def test_cluster_fixed_budget_has_no_violation() -> None:
    """A read returns the committed bytes or a miss, whatever happens to nodes, links and the store; and then all comes to rest."""
    assert [f"seed {verdict.seed}: {verdict.violation}" for verdict in verdicts() if verdict.violation] == []
    assert all(verdict.events >= EVENTS for verdict in verdicts())
    assert sum(verdict.delivered for verdict in verdicts()) > 50 * SEEDS


def test_cluster_fixed_budget_reaches_every_mark() -> None:
    """A checker that never sees the dangerous moment proves nothing."""
    coverage = Coverage(CLUSTER_MARKS)
    for verdict in verdicts():
        coverage.add(verdict.coverage)
    assert coverage.missing() == []


def test_cluster_digest_does_not_depend_on_hash_seed() -> None:
    """Nothing is decided by the order of a set, or by where an object lies in memory."""
    assert digest_of("1") == digest_of("2")


def test_cluster_same_seed_is_the_same_run_traced_or_not() -> None:
    """A failure can be reproduced from its seed, and looking doesn't disturb."""
    lines: list[str] = []
    assert run_cluster(1, EVENTS, NODES, lines.append) == verdicts()[1]
    assert any("joined" in line for line in lines)
    assert len({verdict.digest for verdict in verdicts()}) == SEEDS


def test_cluster_worlds_are_of_all_kinds_and_sizes() -> None:
    """Faults hide each other: each is off in some worlds."""
    worlds = [draw_cluster(seed, NODES) for seed in range(60)]
    assert {world.kind for world in worlds} == {"calm", "careful", "wild"}
    assert {world.config.copies for world in worlds} == {1, 2, 3}
    assert {world.roomy for world in worlds} == {True, False}
    for fault in {fault for world in worlds for fault in world.faults}:
        assert not all(fault in world.faults for world in worlds)


def test_cluster_leaves_time_and_logging_as_they_were() -> None:
    """A world's clock must not outlive it."""
    before = time.monotonic_ns, time.time_ns, logging.root.manager.disable
    run_cluster(2, 50, 3)
    assert (time.monotonic_ns, time.time_ns, logging.root.manager.disable) == before
