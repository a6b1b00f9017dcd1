"""Small private files: one writer at a time, and nobody waits for ever."""

import fcntl
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.security import files
from kvpool.security.files import locked


def test_lock_that_somebody_keeps_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process must not stop every server that keeps the same file."""
    monkeypatch.setattr(files, "LOCK_S", 0.05)
    path = tmp_path / "tenants.json"
    with locked(path), pytest.raises(ConfigError, match="another process"), locked(path):
        pytest.fail("two at a time")
    with locked(path), path.with_name(".tenants.json.lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
