"""`kvpool quota`: list, set, remove."""

import pytest

from kvpool.testing.twin_cluster import A, B, TwinCluster
from kvpool.units import GIB


def test_quota_is_listed_set_and_removed(twins: TwinCluster) -> None:
    """The list is the default; a quota is per node."""
    assert twins.json("quota") == {
        "quotas": [
            {"node": A, "tenant": "team", "used_bytes": 8192, "max_bytes": None},
            {"node": B, "tenant": "", "used_bytes": 8192, "max_bytes": None},
        ],
        "errors": {},
    }
    assert [row["max_bytes"] for row in twins.json("quota", "team", "--set", "10GiB")["quotas"]] == [10 * GIB] * 2
    assert [row["node"] for row in twins.json("quota", "", "--set", "16KiB", "--node", "b")["quotas"]] == [B]
    shown = twins.run("quota")
    assert shown.exit_code == 0
    for piece in ("team", "10.00 GiB", "8.00 KiB", "50.0 %", "''"):
        assert piece in shown.output
    assert "no quota" in twins.run("quota", "team", "--remove").output
    assert [row["node"] for row in twins.json("quota", "team")["quotas"]] == [A]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["team", "--set", "1GiB", "--remove"], "use one of them"),
        (["--set", "1GiB"], "say whose quota"),
        (["--remove"], "say whose quota"),
        (["team", "--set", "0"], "use --remove"),
        (["team", "--set", "much"], "not a size"),
    ],
)
def test_quota_without_sense_changes_nothing(twins: TwinCluster, arguments: list[str], words: str) -> None:
    """A quota that would shut a tenant out, or is nobody's, is a mistake."""
    result = twins.run("quota", *arguments)
    assert result.exit_code == 1
    assert words in result.output
    assert [row["max_bytes"] for row in twins.json("quota")["quotas"]] == [None, None]
