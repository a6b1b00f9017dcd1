"""`kvpool pin` and `kvpool unpin`: for how long, how hard, in whose name."""

from typing import Any

import pytest

from kvpool.testing.twin_cluster import KEYS, STRANGER, TEXT, A, B, TwinCluster


def outcomes(answer: Any) -> list[dict[str, str]]:
    return [block["outcomes"] for block in answer["blocks"]]


def test_pin_keeps_all_copies_for_the_time_given(twins: TwinCluster) -> None:
    """A text is pinned wherever its blocks are, in the operator's name."""
    answer = twins.json("pin", "--prefix", TEXT, "--for", "90s", "--hard")
    assert set(answer) == {"owner", "hard", "duration_ms", "model", "blocks", "totals", "absent", "errors"}
    assert (answer["owner"], answer["hard"], answer["duration_ms"]) == ("operator", True, 90_000)
    assert (answer["totals"], answer["absent"]) == ({"pinned": 4, "refused": 0}, 0)
    assert outcomes(answer)[0] == {A: "pinned", B: "absent"}
    assert all(pins == {"operator": (True, pins["operator"][1])} for pins in (block.pins for block in twins.a.blocks.values()))
    shown = twins.run("pin", "--prefix", TEXT)
    assert shown.exit_code == 0
    assert "4 copies pinned (soft) for 30m, 0 refused" in shown.output


def test_pin_that_was_not_had_exits_3(twins: TwinCluster) -> None:
    """A script that counts on a pin learns that there is none."""
    assert twins.json("pin", STRANGER, exit_code=3)["absent"] == 1
    twins.a.put([b"\x01" * 32], length=48 << 20)
    refused = twins.json("pin", "01" * 32, "--hard", exit_code=3)
    assert (outcomes(refused), refused["totals"]) == ([{A: "refused", B: "absent"}], {"pinned": 0, "refused": 1})
    assert twins.json("pin", "01" * 32)["totals"]["pinned"] == 1


@pytest.mark.parametrize(("text", "words"), [("30", "not a duration"), ("0s", "between 1 ms and 7 d"), ("8d", "between 1 ms and 7 d")])
def test_pin_for_no_time_or_ever_is_refused(twins: TwinCluster, text: str, words: str) -> None:
    """Pins end; how long is said in words that can't be misread."""
    result = twins.run("pin", STRANGER, "--for", text)
    assert result.exit_code == 1
    assert words in result.output


def test_unpin_ends_the_pins_of_one_owner(twins: TwinCluster) -> None:
    """Nobody takes away another's pin by accident."""
    twins.json("pin", "--prefix", TEXT)
    twins.json("pin", "--prefix", TEXT, "--owner", "batch")
    answer = twins.json("unpin", "--prefix", TEXT, "--owner", "batch")
    assert answer == {"model": "toy", "owner": "batch", "unpinned": {A: 2, B: 2}, "errors": {}}
    assert all(set(block.pins) == {"operator"} for block in twins.a.blocks.values())
    shown = twins.run("unpin", KEYS[1].hex())
    assert shown.exit_code == 0
    assert "2 pins of operator ended" in shown.output
    assert twins.json("unpin", KEYS[1].hex())["unpinned"] == {A: 0, B: 0}
