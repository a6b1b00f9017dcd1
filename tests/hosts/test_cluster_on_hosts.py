"""Three real nodes on three hosts, two copies, clients at work: whoever is killed, frozen or cut off, no request notices."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.testing.hosts import unsupported
from kvpool.testing.load import Done
from kvpool.testing.world import World

hosts_only = pytest.mark.skipif(unsupported() is not None, reason=f"no hosts here: {unsupported()}")
VICTIM = 2
REQUESTS = 30
PATIENCE_S = 15.0
"""A request that takes longer has failed. A busy machine is no fault of the pool."""


@pytest.mark.skipif("CI" not in os.environ, reason="only CI must be able to make hosts")
def test_ci_makes_hosts() -> None:
    """Skipped tests look green: where they must run, what they need has to be there."""
    assert unsupported() is None


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory: Path = tmp_path_factory.mktemp("world")
    made = World(nodes=3, clients=2, chains=12, rate=15, capacity="64MiB", directory=directory, deadline_s=PATIENCE_S)
    with made:
        made.start(3, 250, settings={"copies": "2", "near_copies": "false", "hot_reads": "0"})
        yield made
        made.rest()


def all_found(done: list[Done]) -> bool:
    """No wrong byte, no failed request, no miss; and there were requests."""
    assert [(one.wrong, one.error) for one in done if one.wrong or one.error] == []
    assert [one for one in done if one.hit < one.total] == []
    return len(done) >= REQUESTS


def away(world: World) -> None:
    """Wait until the view does without the victim."""
    world.wait(lambda: world.states().get(world.ids[VICTIM]) in (None, "quarantined"), "the view does without the victim")


def back(world: World) -> None:
    """Wait until all nodes are active, that is, have all that is theirs."""
    world.wait(lambda: world.states() == dict.fromkeys(world.ids[:3], "active"), "all nodes active again")


@hosts_only
def test_kill_of_a_node_costs_nothing_not_even_a_hit(world: World) -> None:
    """The other copies serve, before and after anybody knows; the node comes back empty and is given what is its."""
    assert all_found(world.work(REQUESTS))
    world.signal_node(VICTIM, signal.SIGKILL)
    assert all_found(world.work(REQUESTS))
    away(world)
    assert all_found(world.work(REQUESTS))
    world.start_node(VICTIM)
    back(world)
    assert all_found(world.work(REQUESTS))


@hosts_only
def test_node_that_freezes_costs_nothing(world: World) -> None:
    """It answers nobody and closes nothing."""
    world.signal_node(VICTIM, signal.SIGSTOP)
    assert all_found(world.work(REQUESTS))
    away(world)
    world.signal_node(VICTIM, signal.SIGCONT)
    back(world)
    assert all_found(world.work(REQUESTS))


@hosts_only
def test_partition_in_one_direction_costs_nothing(world: World) -> None:
    """Nothing that one host sends arrives at the victim; all others reach it, and all hear what it says."""
    hosts = world.hosts
    hosts.cut(hosts[0], hosts[VICTIM])
    assert all_found(world.work(REQUESTS))
    hosts.heal(hosts[0], hosts[VICTIM])
    assert all_found(world.work(REQUESTS))


@hosts_only
def test_killed_and_emptied_store_costs_nothing(world: World) -> None:
    """The last view keeps serving; the members put the cluster together again, its config included."""
    world.kill_store()
    world.wait(lambda: not world.views[-1]["connected"], "the loss is noticed")
    assert all_found(world.work(REQUESTS))
    world.start_store()
    world.wait(lambda: bool(world.views[-1]["connected"]), "the store is found again")
    back(world)
    assert all_found(world.work(REQUESTS))
    world.wait(lambda: world.kvpool("config", "get", "copies")["settings"] == {"copies": 2}, "the config is back")
    assert all(node["error"] is None for node in world.books().values())
