"""Real processes, really killed."""

from pathlib import Path

from kvpool.testing.kill_ssd import SEGMENT, run


def test_log_of_killed_writers_keeps_every_acknowledged_record(tmp_path: Path) -> None:
    """What a put answered True for is there after SIGKILL at any moment, whole, and what was removed is not."""
    result = run(str(tmp_path), kills=16, records=0, length=0)
    assert result["ok"], result
    assert result["readopted"] == 1.0
    assert result["acknowledged"] > 100


def test_small_log_of_killed_writers_keeps_the_newest(tmp_path: Path) -> None:
    """The same while the log gives up old segments all the time."""
    result = run(str(tmp_path), kills=6, records=0, length=0, capacity=5 * SEGMENT, seed=2)
    assert result["ok"], result
