"""A small file that is read again when it has changed: certificates, tokens, limits.

Whoever replaces such a file does it as a whole (write beside, rename over). A new content that can't be used is reported once and the
last good one stays in force: a slip of the pen must neither lock everybody out nor let anybody in.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kvpool.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FILE_BYTES = 16 << 20


class Watched(Generic[T]):
    """What `parse` makes of the bytes of the files at `paths`, given in that order; thread-safe.

    Raises `ConfigError` at once when it can't be had at all. `parse` raises `ConfigError`, and its messages must not quote secrets.
    """

    def __init__(self, parse: Callable[..., T], *paths: Path) -> None:
        self._parse = parse
        self._paths = paths
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._value = self._read()

    def value(self) -> T:
        """The newest usable content."""
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                try:
                    self._value = self._read()
                    log.info("read %s again: it has changed", self._names())
                except ConfigError as error:
                    log.error("the new content of %s is not used, the last one stays in force: %s", self._names(), error)
            return self._value

    def _read(self) -> T:
        return self._parse(*map(_bytes_of, self._paths))

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_stamp_of, self._paths))

    def _names(self) -> str:
        return ", ".join(map(str, self._paths))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes; is it the right file?")
    return content
