"""Real processes: readers of a busy board get right bytes, and every step of the protocol is needed for that."""

import pytest

from kvpool.testing.board_proof import SABOTAGES, prove


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
