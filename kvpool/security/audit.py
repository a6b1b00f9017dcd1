"""The audit log: one JSON line per action of an operator, who, what, when and how it ended. Never a token, never a secret.

Mode 0600. At `max_bytes` the file is renamed to `.1`, `.1` to `.2` and so on; `keep` old ones stay.
"""

import json
import logging
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from kvpool.errors import ConfigError
from kvpool.security.files import PRIVATE
from kvpool.units import MIB

log = logging.getLogger(__name__)

_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class AuditLog:
    """Appends lines to `path`, from any thread. Raises `ConfigError` when it can't be opened."""

    def __init__(self, path: Path, *, max_bytes: int = 16 * MIB, keep: int = 4) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._keep = keep
        self._lock = threading.Lock()
        try:
            self._file = os.open(path, _FLAGS, PRIVATE)
            os.fchmod(self._file, PRIVATE)
        except OSError as error:
            raise ConfigError(f"can't open the audit log {path}: {error.strerror}") from None

    def write(self, *, who: str, peer: str, what: str, details: Mapping[str, object], outcome: str) -> None:
        """Record one action. A line that can't be written is an error in the process's log, with its content."""
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        record = {"when": when, "who": who, "peer": peer, "what": what, "details": dict(details), "outcome": outcome}
        line = json.dumps(record, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
        with self._lock:
            try:
                if os.fstat(self._file).st_size + len(line) > self._max_bytes:
                    self._rotate()
                os.write(self._file, line)
            except OSError as error:
                log.error("can't write to the audit log %s (%s): %s", self._path, error.strerror, line.decode().strip())

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _rotate(self) -> None:
        for number in range(self._keep - 1, 0, -1):
            older = self._old(number)
            if older.exists():
                os.replace(older, self._old(number + 1))
        os.replace(self._path, self._old(1))
        fresh = os.open(self._path, _FLAGS, PRIVATE)
        os.close(self._file)
        self._file = fresh

    def _old(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
