"""Seeds as text that people read.

A seed that once failed is kept here as a transcript, so that the story that led to the defect stays told. Run with KVPOOL_REWRITE=1
to write the transcripts anew after a change of behaviour, then read the diff. A new one is an empty file `seed-S.txt` and a rewrite.
"""

import os
from pathlib import Path

import pytest

from kvpool.testing.sim import run_seed

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("seed-*.txt"))
REWRITE = os.environ.get("KVPOOL_REWRITE") == "1"
EVENTS = 260


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_simulation_replays_transcript_word_for_word(path: Path) -> None:
    """A change of what the core decides is a diff that somebody reads."""
    lines: list[str] = []
    verdict = run_seed(int(path.stem.removeprefix("seed-")), EVENTS, lines.append)
    text = "\n".join([*lines, f"{verdict.events} events, {verdict.delivered} blocks read", ""])
    if REWRITE:
        path.write_text(text)
    assert verdict.violation == ""
    assert path.read_text() == text


def test_transcripts_are_there() -> None:
    """An empty folder would pass in silence."""
    assert len(TRANSCRIPTS) >= 2
