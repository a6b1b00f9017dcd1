"""`kvpool config`: get and set."""

import pytest

from kvpool.cluster import ClusterConfig
from kvpool.testing.membership_kit import eventually
from kvpool.testing.twin_cluster import TwinCluster
from kvpool.units import MIB

FINGERPRINT = "0123456789abcdef" * 2


def test_config_of_a_new_cluster_is_the_defaults(twins: TwinCluster) -> None:
    """Everything that can be set is listed, under the name and in the form in which it is set."""
    assert twins.json("config", "get") == {"version": 0, "settings": ClusterConfig().settings()}
    shown = twins.run("config", "get")
    assert shown.exit_code == 0
    for piece in ("version 0", "copies", "extent_tokens", "512", "rebalance_bytes_per_s", "256 MiB", "near_copies", "true"):
        assert piece in shown.output


def test_config_set_is_seen_by_every_member_and_shown(twins: TwinCluster) -> None:
    """One change, one version; the answer says from what to what."""
    changed = twins.run("config", "set", "copies", "2")
    assert (changed.exit_code, changed.output) == (0, "copies: 1 -> 2 (version 1)\n")
    eventually(lambda: twins.membership.config == ClusterConfig(version=1, copies=2), "a member has it")
    assert twins.json("config", "set", "rebalance_bytes_per_s", "1GiB") == {
        "version": 2,
        "settings": {"rebalance_bytes_per_s": 1024 * MIB},
    }
    assert twins.run("config", "get", "rebalance_bytes_per_s").output == "1 GiB\n"
    assert twins.run("config", "set", "rebalance_bytes_per_s", "1234567").output.endswith("1 GiB -> 1234567 (version 3)\n")
    assert twins.run("config", "set", "handover_s", "1m30s").output == "handover_s: 30 -> 90 (version 4)\n"
    assert twins.run("config", "set", "near_copies", "false").output == "near_copies: true -> false (version 5)\n"
    assert twins.json("config", "get", "copies") == {"version": 5, "settings": {"copies": 2}}


def test_config_what_is_shown_can_be_set_again(twins: TwinCluster) -> None:
    """Output is input: setting each value as it is shown changes nothing, not even the version."""
    for name in ClusterConfig().settings():
        value = twins.run("config", "get", name).output.strip()
        assert twins.run("config", "set", name, value).output == f"{name}: {value} -> {value} (version 0)\n"


def test_config_of_one_namespace_is_set_and_taken_back(twins: TwinCluster) -> None:
    """A namespace that matters more may have more copies."""
    name = f"namespace_copies.{FINGERPRINT}"
    assert twins.run("config", "set", name, "3").output == f"{name}: 1 -> 3 (version 1)\n"
    assert name in twins.run("config", "get").output
    assert twins.json("config", "get")["settings"][name] == 3
    assert twins.run("config", "set", name, "default").output == f"{name}: 3 -> 1 (version 2)\n"
    assert name not in twins.json("config", "get")["settings"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["set", "copies", "0"], "copies must be 1..16"),
        (["set", "copies", "two"], "whole number"),
        (["set", "colour", "red"], "there are copies, extent_tokens"),
        (["set", "version", "7"], "no setting 'version'"),
        (["set", "namespace_copies.x", "2"], "32 lowercase hex digits"),
        (["get", "colour"], "no setting 'colour'"),
        (["get", "namespace_copies.x"], "32 lowercase hex digits"),
    ],
)
def test_config_without_sense_changes_nothing(twins: TwinCluster, arguments: list[str], words: str) -> None:
    """The error says what would do."""
    result = twins.run("config", *arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert twins.json("config", "get")["version"] == 0


def test_config_without_a_store_is_an_error(twins: TwinCluster) -> None:
    """No defaults are shown for a cluster that can't be reached."""
    twins.url = "redis://127.0.0.1:9/0?lease_ms=300"
    for arguments in (["get"], ["set", "copies", "2"]):
        result = twins.run("config", *arguments)
        assert result.exit_code == 1
        assert "can't be reached" in result.output
