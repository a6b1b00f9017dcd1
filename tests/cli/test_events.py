"""`kvpool events`: the tail of what nodes hold."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from typing import Any

import grpc.aio
import pytest

from kvpool.block import BlockKey
from kvpool.cli.main import cli
from kvpool.request.events import BELOW, DRAM
from kvpool.testing.cli_cluster import CliCluster
from kvpool.testing.events_twin import MemoryEvents
from kvpool.testing.membership_kit import until
from kvpool.wire.events_server import add_events
from kvpool.wire.fence import NodeIdentity

A, B = "a" * 32, "b" * 32
KEYS = [BlockKey(sha256(b"%d" % number).digest()) for number in range(6)]


class Cluster(CliCluster):
    """Two nodes' events."""

    def __init__(self) -> None:
        super().__init__(cli)
        self.a, self.b = MemoryEvents(NodeIdentity(A, 7)), MemoryEvents(NodeIdentity(B, 8))
        for twin in (self.a, self.b):
            self.member(twin.identity.node_id, self.serve(partial(add_events, handler=twin)))

    def member(self, node: str, address: str) -> None:
        self.membership.join(role="node", id=node, address=address, info={"incarnation": "7"})
        until(self.membership, lambda view: node in {member.id for member in view})

    def lines(self, *arguments: str, exit_code: int = 0) -> list[dict[str, Any]]:
        result = self.run("events", "--json", *arguments)
        assert result.exit_code == exit_code, result.output
        return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    one = Cluster()
    yield one
    one.close()


def test_events_tail_prints_what_changes_and_only_counts_what_is_there(cluster: Cluster) -> None:
    """An operator sees blocks come, move and go; what was there before is one line."""
    events = cluster.a.events
    events.stored(DRAM, KEYS[0], None, 0)
    cluster.a.later = [
        partial(events.stored, DRAM, KEYS[1], KEYS[0], 16),
        partial(events.stored, BELOW, KEYS[1], KEYS[0], 16),
        partial(events.removed, DRAM, KEYS[1]),
        partial(events.removed, DRAM, KEYS[0]),
    ]
    lines = cluster.lines("--node", "aaaa", "--count", "3")
    assert lines[0] == {"node": A, "incarnation": 7, "sequence": 1, "event": "snapshot", "blocks": 1}
    assert lines[1] == {
        "node": A,
        "incarnation": 7,
        "sequence": 2,
        "event": "stored",
        "key": KEYS[1].hex(),
        "parent": KEYS[0].hex(),
        "depth": 16,
        "tier": "dram",
    }
    assert [(line["sequence"], line["event"], line.get("tier")) for line in lines[2:]] == [(3, "stored", "below"), (4, "removed", None)]


def test_events_from_start_prints_what_is_held_first(cluster: Cluster) -> None:
    """`--from-start` is the whole truth: held blocks, then changes; a first block has no parent."""
    events = cluster.a.events
    events.stored(DRAM, KEYS[0], None, 0)
    events.stored(DRAM, KEYS[1], KEYS[0], 16)
    cluster.a.later = [partial(events.removed, DRAM, KEYS[0])]
    lines = cluster.lines("--node", "a", "--from-start", "--count", "3")
    assert [(line["event"], line.get("depth")) for line in lines] == [("held", 0), ("held", 16), ("snapshot", None), ("removed", None)]
    assert lines[0]["parent"] is None


def test_events_for_people_are_one_line_each_of_all_nodes(cluster: Cluster) -> None:
    """Node, number, what, key, tier, depth, in columns."""
    for twin, key in ((cluster.a, KEYS[0]), (cluster.b, KEYS[1])):
        twin.later = [partial(twin.events.stored, BELOW, key, None, 32)]
    result = cluster.run("events", "--count", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert f"aaaaaaaa         1  stored    {KEYS[0].hex()[:16]}  below  at 32" in lines
    assert f"bbbbbbbb         1  stored    {KEYS[1].hex()[:16]}  below  at 32" in lines
    assert "bbbbbbbb         0  snapshot  of 0 blocks; changes follow" in lines


def test_events_of_a_node_that_does_not_answer_say_so_and_exit_2(cluster: Cluster) -> None:
    """The others are shown, scripts notice, and the reason is told once."""
    cluster.member("c" * 32, "127.0.0.1:9")
    result = cluster.run("events", "--seconds", "1")
    assert result.exit_code == 2
    assert result.stderr.count("cccccccc: 127.0.0.1:9") == 1
    assert "bbbbbbbb" in result.stdout


def test_events_go_on_when_a_node_comes_back_at_another_address(cluster: Cluster) -> None:
    """A restart is a new snapshot of another life, not the end of the tail."""
    again = MemoryEvents(NodeIdentity(A, 9))
    again.later = [partial(again.events.stored, DRAM, KEYS[2], None, 0)]

    def restart() -> None:
        threading.Thread(target=move).start()

    def move() -> None:
        cluster.member(A, cluster.serve(partial(add_events, handler=again)))
        cluster.a.open = False

    cluster.a.later = [restart]
    lines = cluster.lines("--node", "a", "--count", "1")
    assert [(line["incarnation"], line["event"]) for line in lines] == [(7, "snapshot"), (9, "snapshot"), (9, "stored")]


def test_events_of_a_node_too_old_to_tell_are_an_error_that_is_told(cluster: Cluster) -> None:
    """During a rolling upgrade some nodes don't know the call yet."""

    def nothing(server: grpc.aio.Server) -> None:
        """An empty server."""

    cluster.member("d" * 32, cluster.serve(nothing))
    result = cluster.run("events", "--node", "dddd", "--seconds", "0.5")
    assert result.exit_code == 2
    assert "dddddddd" in result.stderr
