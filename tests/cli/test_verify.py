"""`kvpool verify`: every copy on every node is read; what is corrupt is named, dropped and noticed by scripts."""

import pytest

from kvpool.request import admin as a
from kvpool.testing.twin_cluster import DEAD, KEYS, A, B, TwinCluster
from kvpool.wire.fence import NodeIdentity


def test_verify_of_a_sound_cluster_reads_every_copy(twins: TwinCluster) -> None:
    """Exit code 0 means that all was read and right."""
    answer = twins.json("verify")
    assert set(answer) == {"tiers", "seconds", "errors"}
    assert answer["seconds"] >= 0
    assert answer["tiers"] == [
        {"node": node, "tier": "arena", "checked": 2, "checked_bytes": 8192, "corrupt": [], "corrupt_count": 0, "done": True}
        for node in (A, B)
    ]
    shown = twins.run("verify", "--tier", "arena", "--rate", "1GiB")
    assert shown.exit_code == 0
    assert "4 copies (16.00 KiB) read in" in shown.output
    assert "0 corrupt and dropped" in shown.output


def test_verify_that_finds_corruption_names_it_and_exits_3(twins: TwinCluster) -> None:
    """The corrupt copy is gone afterwards, the good one elsewhere stays; a dead node doesn't hide the find."""
    twins.b.damage(KEYS[1])
    twins.node(NodeIdentity(DEAD, 1))
    answer = twins.json("verify", exit_code=3)
    assert [(tier["node"], tier["corrupt"], tier["corrupt_count"]) for tier in answer["tiers"]] == [(A, [], 0), (B, [KEYS[1].hex()], 1)]
    assert list(answer["errors"]) == [DEAD]
    (block,) = twins.json("inspect", KEYS[1].hex(), exit_code=2)["blocks"]
    assert [copy["node"] for copy in block["copies"]] == [A]
    assert twins.json("verify", "--node", B)["tiers"][0]["checked"] == 1


def test_verify_shows_corrupt_keys_to_people(twins: TwinCluster) -> None:
    """The keys in full, because that is what `kvpool inspect` takes."""
    twins.a.damage(KEYS[0])
    result = twins.run("verify")
    assert result.exit_code == 3
    assert f"corrupt: {KEYS[0].hex()} in arena of aaaaaaaa" in result.output
    assert "1 corrupt and dropped" in result.output


def test_verify_keeps_what_was_found_before_a_node_failed(twins: TwinCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a scrub that found something has found something."""
    monkeypatch.setattr("kvpool.cli.scrub.STEP_BYTES", 4096)
    real, steps = twins.a.verify, list[str]()

    async def verify(tier: str, *, cursor: str, max_bytes: int) -> a.VerifyReport:
        steps.append(cursor)
        if len(steps) == 2:
            twins.a.identity = NodeIdentity(A, 99)  # it restarts
        return await real(tier, cursor=cursor, max_bytes=max_bytes)

    twins.a.put([b"\x01" * 32, b"\x02" * 32])
    twins.a.damage(b"\x01" * 32)
    monkeypatch.setattr(twins.a, "verify", verify)
    answer = twins.json("verify", exit_code=3)
    (tally,) = [tier for tier in answer["tiers"] if tier["node"] == A]
    assert (tally["checked"], tally["corrupt_count"], tally["done"]) == (2, 1, False)
    assert "was meant for" in answer["errors"][A]


def test_verify_out_of_time_says_so_and_exits_2(twins: TwinCluster) -> None:
    """An unread tier must not look like a sound one."""
    answer = twins.json("verify", "--within", "0s", exit_code=2)
    assert [tier["done"] for tier in answer["tiers"]] == [False, False]
    assert "stopped after 0s" in twins.run("verify", "--within", "0s").output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tier", "sdd"], "no node has a tier 'sdd'; there are arena"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--rate", "fast"], "not a size"),
        (["--within", "5"], "not a duration"),
    ],
)
def test_verify_of_nothing_says_what_there_is(twins: TwinCluster, arguments: list[str], words: str) -> None:
    """A typo must not look like a clean scrub."""
    result = twins.run("verify", *arguments)
    assert result.exit_code == 1
    assert words in result.output
