"""`kvpool drain`: what it asks of the node, when it ends, and with which exit code."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvpool.cli.main import cli
from kvpool.testing.twin_cluster import NOBODY, A, B, TwinCluster
from kvpool.wire.fence import NodeIdentity


@pytest.fixture
def cluster() -> Iterator[TwinCluster]:
    made = TwinCluster(cli)
    yield made
    made.close()


def test_drain_ends_well_when_every_block_is_elsewhere(cluster: TwinCluster) -> None:
    """Exit code 0 is a promise: the node can be stopped."""
    cluster.a.moved.update(cluster.a.blocks)
    said = cluster.json("drain", A[:4])
    assert (said["node"], said["done"], said["errors"]) == (A, True, {})
    assert (said["balance"]["state"], said["balance"]["safe_blocks"], said["balance"]["blocks"]) == ("draining", 2, 2)
    assert cluster.b.state == "active"
    result = cluster.run("drain", A)
    assert result.exit_code == 0
    assert "is drained" in result.output


def test_drain_waits_until_the_node_is_done(cluster: TwinCluster) -> None:
    """It takes as long as it takes, within the deadline."""

    def move() -> None:
        while cluster.a.state == "active":
            time.sleep(0.01)
        cluster.a.moved.update(cluster.a.blocks)

    mover = threading.Thread(target=move)
    mover.start()
    assert cluster.json("drain", A)["done"]
    mover.join()


def test_drain_out_of_time_goes_on_and_the_same_command_resumes_it(cluster: TwinCluster) -> None:
    """Nothing is lost by a deadline: the node keeps pushing, and who asks again waits on."""
    said = cluster.json("drain", A, "--deadline", "300ms", exit_code=2)
    assert (said["done"], said["balance"]["safe_blocks"]) == (False, 0)
    assert cluster.a.state == "draining"
    assert "goes on" in cluster.run("drain", A, "--deadline", "100ms").output
    cluster.a.moved.update(cluster.a.blocks)
    assert cluster.json("drain", A)["done"]


def test_blocks_that_found_no_room_are_told_with_exit_code_3(cluster: TwinCluster) -> None:
    """Whoever stops the node now loses them: that must not look like success."""
    first, second = cluster.a.blocks
    cluster.a.moved.add(first)
    cluster.a.homeless.add(second)
    said = cluster.json("drain", A, exit_code=3)
    assert (said["done"], said["balance"]["safe_blocks"]) == (False, 1)
    result = cluster.run("drain", A)
    assert result.exit_code == 3
    assert "1 blocks" in result.output


def test_cancel_has_the_node_serve_as_before(cluster: TwinCluster) -> None:
    """An operator may change their mind."""
    cluster.json("drain", A, "--deadline", "100ms", exit_code=2)
    assert cluster.json("drain", A, "--cancel")["balance"]["state"] == "active"
    assert cluster.a.state == "active"


def test_rate_is_written_with_or_without_per_second_and_must_make_sense(cluster: TwinCluster) -> None:
    """200MiB and 200MiB/s mean the same; none at all would never end."""
    cluster.a.moved.update(cluster.a.blocks)
    assert cluster.json("drain", A, "--rate", "200MiB/s")["done"]
    assert cluster.json("drain", A, "--rate", "200MiB")["done"]
    assert "above 0" in cluster.run("drain", A, "--rate", "0").output
    assert cluster.run("drain", A, "--rate", "fast").exit_code == 1


def test_last_active_node_and_strangers_are_not_drained(cluster: TwinCluster) -> None:
    """Without somebody to take the blocks the command could only wait in vain."""
    assert cluster.run("drain", "ffff").exit_code == 1
    cluster.membership.join(role="node", id=B, address=NOBODY, info={"incarnation": "8", "state": "draining"})
    result = cluster.run("drain", A)
    assert result.exit_code == 1
    assert "no other active node" in result.output


def test_node_that_does_not_answer_is_told_with_exit_code_2(cluster: TwinCluster) -> None:
    """The operator must not believe it was drained."""
    cluster.node(NodeIdentity("c" * 32, 1))
    said = cluster.json("drain", "c", exit_code=2)
    assert list(said["errors"]) == ["c" * 32]
    assert said["balance"] is None


def test_nodes_shows_states(cluster: TwinCluster) -> None:
    """Who joins, drains or can't be reached is seen at a glance."""
    cluster.membership.join(role="node", id="d" * 32, address=NOBODY, info={"incarnation": "1", "state": "joining"})
    states = {node["id"][0]: node["state"] for node in cluster.json("nodes", exit_code=2)}
    assert states == {"a": "active", "b": "active", "d": "joining"}
    assert "joining" in cluster.run("nodes").output


def test_blocks_of_which_nobody_knows_where_they_belong_are_told_with_exit_code_3(cluster: TwinCluster) -> None:
    """They would go with the node: exit code 0 would be a lie."""
    first, second = cluster.a.blocks
    cluster.a.moved.add(first)
    cluster.a.homeless.add(second)
    cluster.a.adrift = 1
    said = cluster.json("drain", A, exit_code=3)
    assert (said["done"], said["balance"]["counters"]["adrift"]) == (False, 1)
    assert "gap in their chain" in cluster.run("drain", A).output
