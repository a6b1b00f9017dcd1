"""What holds for every operator's command: all nodes or one, dead nodes, other lives, bad arguments."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvpool.cli.main import cli
from kvpool.cluster import open_membership
from kvpool.testing.membership_kit import until
from kvpool.testing.twin_cluster import DEAD, KEYS, NOBODY, STRANGER, TEXT, A, B, TwinCluster
from kvpool.wire.fence import NodeIdentity

COMMANDS = [
    ["inspect", "--prefix", TEXT],
    ["evict", "--prefix", TEXT, "--dry-run"],
    ["pin", KEYS[1].hex()],
    ["unpin", "--prefix", TEXT],
    ["quota"],
    ["gc", "--dry-run"],
    ["verify"],
    ["tiers"],
]
NAMES = [command[0] for command in COMMANDS]


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_command_with_a_dead_node_answers_from_the_others_and_exits_2(twins: TwinCluster, command: list[str]) -> None:
    """What is known is told, and that something isn't."""
    twins.node(NodeIdentity(DEAD, 1))
    answer = twins.json(*command, exit_code=2)
    assert list(answer["errors"]) == [DEAD]
    text = json.dumps({name: value for name, value in answer.items() if name != "errors"})
    assert A in text
    assert B in text
    assert DEAD not in text
    result = twins.run(*command)
    assert result.exit_code == 2
    assert "cccccccc: 127.0.0.1:9" in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_command_for_one_node_asks_no_other(twins: TwinCluster, command: list[str]) -> None:
    """`--node` takes the start of an id; one that is nobody's, or several's, is an error."""
    twins.node(NodeIdentity(DEAD, 1))
    answer = twins.json(*command, "--node", "AA")
    assert A in json.dumps(answer)
    assert B not in json.dumps(answer)
    twins.node(NodeIdentity("ab" * 16, 1))
    for prefix, words in (("a", "2 nodes have"), ("d", "no node has"), ("", "4 nodes have")):
        result = twins.run(*command, "--node", prefix)
        assert result.exit_code == 1
        assert words in result.output


@pytest.mark.parametrize("command", [command for command in COMMANDS if command[0] not in ("inspect", "quota", "tiers")])
def test_change_meant_for_an_earlier_life_of_a_node_is_refused(twins: TwinCluster, command: list[str]) -> None:
    """The membership may lag behind a restart; then nothing is done, and that is said."""
    twins.b.identity = NodeIdentity(B, 9)
    answer = twins.json(*command, exit_code=2)
    assert "was meant for" in answer["errors"][B]


def test_node_that_publishes_no_incarnation_is_named(twins: TwinCluster) -> None:
    """A member that isn't ours doesn't break the command."""
    twins.membership.join(role="node", id=DEAD, address=NOBODY)
    until(twins.membership, lambda view: len(view) == 5)
    assert "incarnation" in twins.json("tiers", exit_code=2)["errors"][DEAD]


@pytest.mark.parametrize("name", ["inspect", "evict", "pin", "unpin"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either keys"),
        ([STRANGER, "--prefix", "x"], "either keys"),
        ([STRANGER[:-2]], "64 hex digits"),
        (["z" * 64], "64 hex digits"),
        ([STRANGER, "--chat"], "give one with --prefix"),
        (["--prefix", "x", "--model", "third"], "no worker serves 'third'"),
    ],
)
def test_blocks_that_are_not_named_well_are_a_clear_error(twins: TwinCluster, name: str, arguments: list[str], words: str) -> None:
    """One line that says what to write, exit code 1, nothing done."""
    result = twins.run(name, *arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_command_without_a_cluster_says_how_to_start_one(command: list[str]) -> None:
    """One line, no traceback, exit code 1; in a cluster without nodes too."""
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 1
    assert "kvpool up" in result.output
    with open_membership("memory://admin-empty"):
        empty = CliRunner().invoke(cli, [*command, "--cluster", "memory://admin-empty"])
    assert empty.exit_code == 1
    assert "no pool node has joined" in empty.output


def test_every_command_has_help_and_loads_no_torch() -> None:
    """Each explains its exit codes, at once, and none drags the engine, or even gRPC, in to do so."""
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom kvpool.cli.main import cli\n"
        f"for name in {[*NAMES, 'unpin']!r}:\n"
        "    result = CliRunner().invoke(cli, [name, '--help'])\n"
        "    assert result.exit_code == 0 and 'xit code 0' in ' '.join(result.output.split()), result.output\n"
        "print('loaded', sorted({'torch', 'transformers', 'grpc', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert "loaded []" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
