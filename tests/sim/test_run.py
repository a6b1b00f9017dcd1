"""Whole worlds: the fixed budget of seeds holds, reaches every dangerous situation, and is a function of the seed alone."""

import json
import subprocess
import sys
from functools import cache

from kvpool.testing.sim import MARKS, Verdict, draw_world, run_seed
from kvpool.testing.sim.marks import DISK_MARKS, Coverage

SEEDS, EVENTS = 120, 2000


@cache
def verdicts() -> tuple[Verdict, ...]:
    return tuple(run_seed(seed, EVENTS) for seed in range(SEEDS))


def digest_of(*options: str, hash_seed: str) -> str:
    command = [sys.executable, "-m", "kvpool.testing.sim", "--seeds", "6", "--events", "800", "--json", *options]
    done = subprocess.run(command, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["violations"] == 0
    assert answer["seconds"] > 0
    assert answer["events_per_s"] > 0
    return str(answer["digest"])


def test_simulation_fixed_budget_has_no_violation() -> None:
    """Every promise holds in every world of the budget, and each world ran to its end."""
    assert [f"seed {verdict.seed}: {verdict.violation}" for verdict in verdicts() if verdict.violation] == []
    assert all(verdict.events > EVENTS for verdict in verdicts())
    assert sum(verdict.delivered for verdict in verdicts()) > 20 * SEEDS


def test_simulation_fixed_budget_reaches_every_mark() -> None:
    """A checker that never sees the dangerous moment proves nothing."""
    coverage = Coverage()
    for verdict in verdicts():
        coverage.add(verdict.coverage)
    assert coverage.missing() == []
    assert set(coverage.counts) == {*MARKS, *DISK_MARKS}


def test_simulation_same_seed_has_the_same_digest() -> None:
    """A failure can be reproduced from its seed, in the same process too."""
    assert [run_seed(seed, EVENTS).digest for seed in range(8)] == [verdict.digest for verdict in verdicts()[:8]]
    assert len({verdict.digest for verdict in verdicts()}) == SEEDS


def test_simulation_digest_does_not_depend_on_hash_seed_or_processes() -> None:
    """Nothing is decided by the order of a set, and seeds don't share state."""
    assert digest_of(hash_seed="1") == digest_of(hash_seed="2") == digest_of("--jobs", "2", hash_seed="3")


def test_simulation_worlds_differ_and_some_lack_each_fault() -> None:
    """Faults hide each other: each kind is off in some worlds and on in others."""
    worlds = [draw_world(seed) for seed in range(SEEDS)]
    assert len({world.policy for world in worlds}) > 5
    for name in ("client_crash_ns", "client_stop_ns", "node_crash_ns", "bit_flip_ns", "clock_jump_ns", "discard_ns"):
        assert {bool(getattr(world.faults, name)) for world in worlds} == {True, False}
    for name in ("loss", "twice", "straggle", "clog_ns", "split_ns"):
        assert {bool(getattr(world.network, name)) for world in worlds} == {True, False}


def test_simulation_transcript_does_not_change_the_run() -> None:
    """Looking must not disturb: the traced run is the run."""
    lines: list[str] = []
    traced = run_seed(3, EVENTS, lines.append)
    assert traced == verdicts()[3]
    assert len(lines) > 200
