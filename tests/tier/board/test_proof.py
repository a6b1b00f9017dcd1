"""Real processes: readers of a busy board get right bytes, and every step of the protocol is needed for that."""

import json
import sys

import pytest

from kvpool.testing.board_proof import SABOTAGES, main, prove


def test_readers_never_get_wrong_bytes_while_blocks_come_go_and_move() -> None:
    """Copies and holds, some for long; every hold gone at the end."""
    tally = prove(3.0, readers=2)
    assert tally.wrong == 0
    assert tally.as_expected
    assert min(tally.done[name] for name in ("copied", "held", "changed", "moved", "doomed", "drained")) > 0
    assert tally.done["doomed"] == tally.done["drained"]


@pytest.mark.parametrize("sabotage", [name for name in SABOTAGES if name])
def test_each_step_left_out_shows(sabotage: str) -> None:
    """A proof that can't tell the broken protocol from the sound one would be worth nothing."""
    tally = prove(120.0, readers=4, sabotage=sabotage)
    assert tally.wrong > 0


def test_reader_that_breaks_down_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose readers all died found nothing wrong either."""
    monkeypatch.setattr("kvpool.testing.board_proof.INCARNATION", 8)  # here only: the reading processes expect another
    tally = prove(20.0, readers=2)
    assert (tally.wrong, tally.as_expected) == (0, False)
    assert tally.done["crashed"] > 0


def test_command_says_what_it_found_and_fails_when_that_is_not_as_expected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For those who run it for long and look at the end only; a run that did nothing proves nothing."""
    command = ["board_proof", "--seconds", "0", "--readers", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--json"])
    with pytest.raises(SystemExit, match="1"):
        main()
    told = json.loads(capsys.readouterr().out)
    assert (told["wrong"], told["as_expected"], told["left_held"]) == (0, False, 0)
    assert told["done"]["put"] > 0
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("0 wrong in ")
