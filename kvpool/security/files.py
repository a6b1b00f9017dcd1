"""Small private files: mode 0600, replaced as a whole, changed by one process at a time."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpool.errors import ConfigError

PRIVATE = 0o600
LOCK_S = 5.0
"""Longest wait for another process that changes the same file."""
_POLL_S = 0.01


def write_private(path: Path, content: bytes) -> None:
    """Put `content` at `path` (mode 0600) so that readers, and a crash at any moment, see the old or the new one. Raises `ConfigError`."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # mkstemp makes it 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only one who changes `path`, by a lock file beside it. Raises `ConfigError`."""
    try:
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE)
    except OSError as error:
        raise ConfigError(f"can't lock {path}: {error.strerror}") from None
    try:
        _lock(lock, path)
        yield
    finally:
        os.close(lock)


def _lock(lock: int, path: Path) -> None:
    deadline_s = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise ConfigError(f"another process has been changing {path} for {LOCK_S:g} s; see what it is doing") from None
            time.sleep(_POLL_S)
