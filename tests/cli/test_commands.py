"""The commands against a small real cluster: members in memory, gRPC servers with canned answers, a real HTTP router stand-in."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import cast

import pytest
from click.testing import CliRunner

from kvpool.cli.main import COMMANDS, cli
from kvpool.request import DecodeEvent, DecodeRequest, Finished, FinishReason, PrefillEvent, PrefillRequest, Published, WorkerStatus
from kvpool.request.pool import NodeDescription, ShmOffer
from kvpool.testing.cli_cluster import KEYS, CliCluster
from kvpool.testing.membership_kit import until
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_server import PoolHandler, add_pool
from kvpool.wire.worker_server import add_worker

MIB = 1 << 20


class Node:
    """A pool node that can only be looked at."""

    def __init__(self, node_id: str, keys: Sequence[bytes]) -> None:
        self.identity = NodeIdentity(node_id, 1)
        self._keys = set(keys)

    def describe(self) -> NodeDescription:
        return NodeDescription(
            node_id=self.identity.node_id,
            incarnation=self.identity.incarnation,
            capacity_bytes=64 * MIB,
            free_bytes=32 * MIB,
            used_bytes=31 * MIB,
            pinned_bytes=MIB,
            blocks=len(self._keys),
            read_leases=2,
            write_leases=1,
            counters={"hits": 11, "misses": 7},
            shm=ShmOffer(path="/dev/shm/x", boot_id="b"),
        )

    def lookup(self, keys: Sequence[bytes]) -> bytes:
        return bytes(key in self._keys for key in keys)


class Worker:
    """A worker that only says how it is."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id

    async def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        yield Published(tokens=0, blocks_written=0)

    async def decode(self, request: DecodeRequest) -> AsyncIterator[DecodeEvent]:
        yield Finished(reason=FinishReason.STOP)

    async def status(self) -> WorkerStatus:
        return WorkerStatus(
            role="prefill",
            model="toy",
            active_requests=3,
            queued_requests=5,
            finished_requests=70,
            failed_requests=1,
            prefill_tokens_per_s=432.1,
            resident_tokens=96,
            reaches={self._node_id: "shm"},
        )


class Cluster(CliCluster):
    """Two nodes (the first holds blocks 0 and 1, the second the tail), a worker and a router."""

    def __init__(self) -> None:
        super().__init__(cli)
        self.ids = [f"{digit}" * 32 for digit in "ab"]

    def fill(self) -> None:
        for node_id, held in zip(self.ids, (KEYS[:2], KEYS[2:]), strict=True):
            node = cast(PoolHandler, Node(node_id, held))
            self.membership.join(role="node", id=node_id, address=self.serve(partial(add_pool, handler=node)))
        self.worker(address=self.serve(partial(add_worker, handler=Worker(self.ids[0]))))
        self.router()
        until(self.membership, lambda view: len(view) == 4)


@pytest.fixture
def empty() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(empty: Cluster) -> Cluster:
    empty.fill()
    return empty


def test_status_json_has_every_member_and_balanced_books(cluster: Cluster) -> None:
    """Programs get all numbers the members gave, flat, with sizes in bytes."""
    status = cluster.json("status")
    assert [node["id"] for node in status["nodes"]] == cluster.ids
    node = status["nodes"][0]
    assert node["free_bytes"] + node["used_bytes"] + node["pinned_bytes"] == node["capacity_bytes"]
    assert (node["blocks"], node["read_leases"], node["write_leases"]) == (2, 2, 1)
    assert (node["counters"]["hits"], node["offers"], node["error"]) == (11, ["shm", "grpc"], None)
    (worker,) = status["workers"]
    assert (worker["role"], worker["model"], worker["active_requests"], worker["queued_requests"]) == ("prefill", "toy", 3, 5)
    assert (worker["prefill_tokens_per_s"], worker["reaches"]) == (432.1, {cluster.ids[0]: "shm"})
    (router,) = status["routers"]
    assert (router["healthy"], router["health"]) == (True, {"status": "ok"})


def test_status_tables_show_fill_load_and_reach(cluster: Cluster) -> None:
    """People see at a glance how full, how busy, and which reach is in use."""
    result = cluster.run("status")
    assert result.exit_code == 0, result.output
    for piece in ("50.0 %", "31.00 MiB", "shm grpc", "432", "aaaaaaaa:shm", "toy", "healthy", "2/1"):
        assert piece in result.output


def test_status_of_a_member_that_does_not_answer_is_shown_and_exits_2(cluster: Cluster) -> None:
    """One dead node doesn't hide the others, and scripts notice."""
    cluster.membership.join(role="node", id="c" * 32, address="127.0.0.1:9")
    until(cluster.membership, lambda view: len(view) == 5)
    status = cluster.json("status", exit_code=2)
    assert [node["error"] is None for node in status["nodes"]] == [True, True, False]
    result = cluster.run("status")
    assert result.exit_code == 2
    assert "127.0.0.1:9" in result.output
    assert "50.0 %" in result.output


def test_nodes_lists_only_nodes(cluster: Cluster) -> None:
    """The short form for operators of the pool."""
    assert [node["id"] for node in cluster.json("nodes")] == cluster.ids
    result = cluster.run("nodes")
    assert "Pool nodes" in result.output
    assert "Workers" not in result.output


def test_lookup_says_how_much_is_cached_and_where(cluster: Cluster) -> None:
    """Two blocks on one node and the tail on the other make the whole text."""
    found = cluster.json("lookup", "a prompt")
    assert (found["tokens"], found["cached_tokens"], found["cached_blocks"], found["model"]) == (40, 40, 3, "toy")
    spans = {node["id"]: node["spans"] for node in found["nodes"]}
    assert spans == {cluster.ids[0]: [[0, 32]], cluster.ids[1]: [[32, 40]]}
    result = cluster.run("lookup", "a prompt")
    assert "40 of 40 tokens are in the pool (100 %)" in result.output
    assert "32-40" in result.output


def test_lookup_of_something_else_finds_nothing(cluster: Cluster) -> None:
    """A miss is an answer, with exit code 0; a conversation and standard input are other texts."""
    assert cluster.json("lookup", "unheard of")["cached_tokens"] == 0
    assert cluster.json("lookup", "a prompt", "--chat")["tokens"] == len("chat:a prompt")
    assert cluster.json("lookup", "-", stdin="a prompt")["cached_tokens"] == 40
    assert cluster.json("lookup", "")["tokens"] == 0


def test_lookup_with_a_dead_node_answers_from_the_others(cluster: Cluster) -> None:
    """What is known is told, and that something isn't."""
    cluster.membership.join(role="node", id="c" * 32, address="127.0.0.1:9")
    until(cluster.membership, lambda view: len(view) == 5)
    found = cluster.json("lookup", "a prompt", exit_code=2)
    assert found["cached_tokens"] == 40
    assert list(found["errors"]) == ["c" * 32]


def test_lookup_in_a_cluster_of_two_models_asks_which(cluster: Cluster) -> None:
    """Equal texts have other blocks under another model: guessing would be wrong half the time."""
    cluster.worker(model="other")
    until(cluster.membership, lambda view: len(view) == 5)
    result = cluster.run("lookup", "a prompt")
    assert result.exit_code == 1
    assert "other, toy" in result.output
    assert "--model" in result.output
    assert cluster.json("lookup", "a prompt", "--model", "toy")["cached_tokens"] == 40
    assert "no worker serves 'third'" in cluster.run("lookup", "a prompt", "--model", "third").output


def test_lookup_during_a_rolling_change_takes_the_namespace_of_most(cluster: Cluster) -> None:
    """Workers of the same name with other weights are noted, not fatal."""
    cluster.worker()
    cluster.worker(root=bytes(32))
    until(cluster.membership, lambda view: len(view) == 6)
    result = cluster.run("lookup", "a prompt", "--json")
    assert json.loads(result.stdout)["cached_tokens"] == 40
    assert "2 namespaces" in result.stderr


def test_lookup_in_an_empty_cluster_says_what_is_missing(empty: Cluster) -> None:
    """No worker, no model; no router, no tokens."""
    assert "no worker has joined" in empty.run("lookup", "x").output
    empty.worker()
    until(empty.membership, lambda view: len(view) == 1)
    assert "no router has joined" in empty.run("lookup", "x").output


@pytest.mark.parametrize("command", [["status"], ["nodes"], ["lookup", "x"]])
def test_commands_without_a_cluster_say_how_to_start_one(command: list[str]) -> None:
    """One line, no traceback, exit code 1."""
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1
    assert "kvpool up" in result.output
    unreachable = CliRunner().invoke(cli, [*command, "--cluster", "redis://127.0.0.1:1/0?cluster=x"])
    assert unreachable.exit_code == 1
    assert "can't be reached" in unreachable.output
    assert "Traceback" not in unreachable.output


def test_help_lists_every_command_and_imports_none_of_them() -> None:
    """`kvpool --help` answers at once: no torch, no gRPC, no numpy."""
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom kvpool.cli.main import cli\n"
        "print(CliRunner().invoke(cli, ['--help']).output)\n"
        "print('loaded', sorted({'torch', 'grpc', 'numpy', 'redis', 'rich', 'asyncio'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "loaded []" in output
    assert all(f"  {name} " in output for name in COMMANDS)


@pytest.mark.parametrize("name", ["up", "status", "nodes", "lookup"])
def test_commands_have_help_and_load_no_torch(name: str) -> None:
    """Every command explains itself, and none drags the engine in."""
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom kvpool.cli.main import cli\n"
        f"result = CliRunner().invoke(cli, [{name!r}, '--help'])\nassert result.exit_code == 0, result.output\n"
        "import kvpool.cli.supervisor, kvpool.cli.snapshot, kvpool.cli.screen, kvpool.cli.live\n"
        "print('loaded', sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert "loaded []" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_unknown_command_is_an_error_of_usage() -> None:
    """click's exit code for wrong usage."""
    assert CliRunner().invoke(cli, ["dance"]).exit_code == 2
