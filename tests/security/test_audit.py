"""The audit log: whole lines, private, bounded."""

import json
import os
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.security.audit import AuditLog


def note(audit: AuditLog, what: str) -> None:
    audit.write(who="alice", peer="ipv4:127.0.0.1:1", what=what, details={"keys": "3 items"}, outcome="OK")


def test_lines_are_json_and_private(tmp_path: Path) -> None:
    """Who, what, when and outcome, for programs."""
    audit = AuditLog(tmp_path / "audit.log")
    note(audit, "Evict\n")
    audit.close()
    (line,) = (tmp_path / "audit.log").read_text().splitlines()
    record = json.loads(line)
    assert (record["who"], record["what"], record["outcome"]) == ("alice", "Evict\n", "OK")
    assert record["when"].endswith("+00:00")
    assert (tmp_path / "audit.log").stat().st_mode & 0o777 == 0o600


def test_file_rotates_and_keeps_only_so_many(tmp_path: Path) -> None:
    """A disk must not fill up with it."""
    audit = AuditLog(tmp_path / "audit.log", max_bytes=300, keep=2)
    for number in range(20):
        note(audit, f"Pin{number}")
    audit.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["audit.log", "audit.log.1", "audit.log.2"]
    assert all(path.stat().st_size <= 300 and path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    assert "Pin19" in (tmp_path / "audit.log").read_text()


def test_file_that_was_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    """An old file may have been made with a loose umask."""
    path = tmp_path / "audit.log"
    path.touch(mode=0o644)
    AuditLog(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_link_is_not_followed(tmp_path: Path) -> None:
    """Somebody else's file must not be written through a link."""
    os.symlink(tmp_path / "elsewhere", tmp_path / "audit.log")
    with pytest.raises(ConfigError, match="audit log"):
        AuditLog(tmp_path / "audit.log")
