"""Find and load libucp: an explicit path, else the system's, else the `libucx` wheel's.

The system's comes before the wheel's because it is the one that knows the cluster's network cards (the wheel is built without verbs).
A path given by hand is taken or refused, never replaced; of the other two the first that is new enough. Older ones than 1.18 are
refused because a peer that dies takes them down (seen with Debian's 1.13.1). The system's version is asked in another process: once loaded
here, its libucs would be mixed with the wheel's.

UCX reads some settings once, while it is being loaded: whether it installs handlers for SIGSEGV and friends (they would print stack
traces over Python's own), where it logs (stdout, by default), whether it starts a monitoring thread. They can only be given through the
environment, so they stand there for the length of the `dlopen`, under a lock, and are taken out again: a child started later does not
inherit them. What the operator has set is left as it is.
"""

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvpool.errors import ConfigError
from kvpool.transport.ucx import api

_log = logging.getLogger(__name__)

LIBRARY_VARIABLE: Final = "KVPOOL_UCX_LIBRARY"
_OLDEST: Final = (1, 18)
_CHECKED: Final = (1, 21)
_AT_LOAD: Final = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_DEBUG_SIGNO": "0",
    "UCX_LOG_FILE": "stderr",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_VFS_ENABLE": "n",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
SYSTEM_LIBRARY: Final = "libucp.so.0"
_ASK_S: Final = 30.0
_ASK: Final = """
import ctypes, sys
calls, numbers = ctypes.CDLL(sys.argv[1]), [ctypes.c_uint() for _ in range(3)]
calls.ucp_get_version(*map(ctypes.byref, numbers))
print(*(number.value for number in numbers))
"""
_UNUSABLE: Final = (OSError, AttributeError, ConfigError, subprocess.SubprocessError)
_lock = threading.Lock()
_loaded: dict[str, "UcpLibrary"] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class UcpLibrary:
    """A loaded libucp with its prototypes set. `origin` is `path`, `system` or `wheel`; `version` is (major, minor, release)."""

    calls: ctypes.CDLL
    origin: str
    path: str
    version: tuple[int, ...]

    @property
    def text(self) -> str:
        """For people: `UCX 1.21.0 (wheel, /.../libucp.so.0)`."""
        return f"UCX {'.'.join(map(str, self.version))} ({self.origin}: {self.path})"


def load_ucp(path: str | None = None) -> UcpLibrary:
    """The process's libucp, loaded on first use. `path` (or the variable `KVPOOL_UCX_LIBRARY`) names the file to take.

    Raises `ConfigError` when there is none, or it is too old, saying what to install.
    """
    explicit = path or os.environ.get(LIBRARY_VARIABLE, "")
    with _lock:
        if explicit not in _loaded:
            _loaded[explicit] = _load_path(explicit) if explicit else _load_found()
            _log.info("using %s", _loaded[explicit].text)
        return _loaded[explicit]


def _load_path(path: str) -> UcpLibrary:
    try:
        return _load("path", path)
    except _UNUSABLE as error:
        raise ConfigError(f"can't use the UCX library {path}: {error}; name a libucp.so.0 or leave {LIBRARY_VARIABLE} empty") from error


def _load_found() -> UcpLibrary:
    refusals: list[str] = []
    for origin, path in _candidates():
        try:
            return _load(origin, path)
        except _UNUSABLE as error:
            refusals.append(f"{origin}: {error}")
            _log.log(logging.DEBUG if isinstance(error, OSError) else logging.WARNING, "not using the UCX of the %s: %s", origin, error)
    raise ConfigError(f"no usable UCX library ({'; '.join(refusals)}): pip install 'kvpool[ucx]', or use the shm and grpc transports")


def _candidates() -> Iterator[tuple[str, str]]:
    yield "system", SYSTEM_LIBRARY
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield "wheel", str(Path(folder) / "lib" / SYSTEM_LIBRARY)


def _load(origin: str, path: str) -> UcpLibrary:
    """Load it and set its prototypes. Raises `OSError`, `AttributeError` (a function is missing), `ConfigError` (version)."""
    if origin == "system":
        _require_new_enough(_version_elsewhere(path))
    with _settings_while_loading():
        calls = ctypes.CDLL(path)
    version = _version(calls)
    _require_new_enough(version)
    api.declare(calls)
    return UcpLibrary(calls=calls, origin=origin, path=path, version=version)


def _version(calls: ctypes.CDLL) -> tuple[int, ...]:
    calls.ucp_get_version.restype = None
    numbers = [ctypes.c_uint() for _ in range(3)]
    calls.ucp_get_version(*(ctypes.byref(number) for number in numbers))
    return tuple(number.value for number in numbers)


def _version_elsewhere(path: str) -> tuple[int, ...]:
    """The version of the library the loader finds under `path`, asked in a short-lived process. Raises `OSError` if it can't be loaded."""
    environment = {**_AT_LOAD, **os.environ}
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", _ASK, path], env=environment, capture_output=True, text=True, timeout=_ASK_S)
    if ran.returncode != 0:
        reason = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        raise OSError(reason.removeprefix("OSError: "))
    return tuple(int(number) for number in ran.stdout.split())


def _require_new_enough(version: tuple[int, ...]) -> None:
    if version[0] != _OLDEST[0] or version[:2] < _OLDEST:
        raise ConfigError(f"it is UCX {'.'.join(map(str, version))}, kvpool needs {'.'.join(map(str, _OLDEST))} or a later 1.x")


def api_version(library: UcpLibrary) -> tuple[int, ...]:
    """The interface version (major, minor) to ask `library` for: its own, but none newer than the structures were checked against."""
    return min(library.version[:2], _CHECKED)


@contextmanager
def _settings_while_loading() -> Iterator[None]:
    mine = {name: value for name, value in _AT_LOAD.items() if name not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
