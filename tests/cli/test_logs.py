"""Logs of past runs: kept, but not for ever."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvpool.cli.logs import KEPT_RUNS, log_root, new_run


def test_log_root_follows_the_state_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs belong where the user's state belongs."""
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert log_root() == Path("/state/kvpool/logs")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert log_root() == Path.home() / ".local/state/kvpool/logs"


def test_new_run_keeps_the_latest_and_touches_nothing_else(tmp_path: Path) -> None:
    """Disk use is bounded by runs; a directory we didn't name isn't ours to remove."""
    (tmp_path / "precious").mkdir()
    old = [tmp_path / f"202601{day:02}T000000Z-{day}" for day in range(1, 16)]
    for path in old:
        path.mkdir()
    run = new_run(tmp_path, datetime(2026, 2, 1, tzinfo=UTC))
    run.mkdir()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [*(path.name for path in old[-KEPT_RUNS + 1 :]), run.name, "precious"]


def test_new_run_without_a_root_needs_none(tmp_path: Path) -> None:
    """The first run ever."""
    assert new_run(tmp_path / "none").parent == tmp_path / "none"
