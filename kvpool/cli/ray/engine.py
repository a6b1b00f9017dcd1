"""Ray itself: a small private one for this machine, or a connection to one that runs.

The private one is a head node with no dashboard, no usage statistics and the smallest object store (kvpool puts nothing in it). It
asks every connection for a token made for this run. Its daemons die with this process: the kernel sees to the daemons, the
cluster's guard to what hangs on to them. Its files lie in a directory of mode 0700 named after this process; directories of
dead predecessors are removed at the next start.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvpool.cli.guard import finish
from kvpool.errors import ConfigError, UnavailableError
from kvpool.units import MIB

LOCAL = "local"
OBJECT_STORE_BYTES = 80 * MIB
"""Ray's least is 75 MiB."""
CONNECT_TIMEOUT_S = 5.0
END_TIMEOUT_S = 10.0
_PREFIX = "kvpool-ray-"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what a process sees of the machine's accelerators is left as it is
}
_LOCAL_ONLY = {
    "RAY_AUTH_MODE": "token",
    "RAY_prestart_worker_first_driver": "0",  # no idle interpreters
    "RAY_worker_niceness": "0",  # as urgent as the processes of the plain launcher
}


def require_ray(*, local: bool = False) -> Any:
    """The module `ray`, set up before it reads its environment. Raises `ConfigError` where it isn't installed."""
    os.environ.update(_QUIET)
    if local:
        os.environ.update(_LOCAL_ONLY, RAY_AUTH_TOKEN=secrets.token_hex(32))
    try:
        import ray
    except ImportError as error:
        raise ConfigError(f"--ray needs the package ray ({error}): pip install 'kvpool[ray]'") from error
    return ray


def host_address() -> str:
    """The IP address of this host as Ray knows it."""
    return str(require_ray().util.get_node_ip_address())


class RayEngine:
    """Ray at `address` (`local`, `auto` or host:port). `open` it on the thread that lives as long as the cluster."""

    def __init__(self, address: str) -> None:
        """Raises `ConfigError` for an address of another kind, or without ray."""
        if address not in (LOCAL, "auto") and not re.fullmatch(r"[A-Za-z0-9._-]+:\d{1,5}", address):
            raise ConfigError(f"--ray takes local, auto or HOST:PORT of a Ray cluster that this machine is part of, got {address!r}")
        self.address = address
        self._module = require_ray(local=address == LOCAL)
        self._ray: Any = None
        self._directory: Path | None = None
        self._daemons: dict[int, int] = {}

    @property
    def local(self) -> bool:
        """True when it is our own."""
        return self.address == LOCAL

    @property
    def ray(self) -> Any:
        """The module, connected."""
        return self._ray

    def open(self, *, cpus: int, memory_bytes: int, on_pid: Callable[[int, bool], None]) -> None:
        """Start or connect. `cpus` and `memory_bytes` are what a Ray of our own says it has; `on_pid` hears of its daemons.

        Raises `ConfigError` where this process uses Ray already, `UnavailableError` when Ray does not start or answer.
        """
        ray = self._module
        if ray.is_initialized():
            raise ConfigError("this process uses Ray already; kvpool needs a process of its own")
        options: dict[str, Any] = {"address": self.address, "log_to_driver": False, "configure_logging": False}
        if self.local:
            options |= {
                "num_cpus": cpus,
                "num_gpus": 0,
                "_memory": max(memory_bytes, MIB),
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": str(self._make_directory() / "r"),
            }
        else:
            _require_answer(self.address)
        before = descendants(os.getpid())
        try:
            with _own_sigterm():
                ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            self._remove_directory()
            raise UnavailableError(f"Ray ({self.address}) does not start or answer: {error}") from error
        self._ray = ray
        if self.local and hasattr(os, "pidfd_open"):
            for pid in sorted(descendants(os.getpid()) - before):
                with contextlib.suppress(ProcessLookupError):
                    self._daemons[pid] = os.pidfd_open(pid)
                    on_pid(pid, True)

    def close(self, on_pid: Callable[[int, bool], None]) -> None:
        """Disconnect; end a Ray of our own and wait until it is gone."""
        if self._ray is not None:
            self._ray.shutdown()
            self._ray = None
            finish(self._daemons, END_TIMEOUT_S)
            while self._daemons:
                pid, descriptor = self._daemons.popitem()
                os.close(descriptor)
                on_pid(pid, False)
        self._remove_directory()

    def _make_directory(self) -> Path:
        sweep_directories(Path(tempfile.gettempdir()))
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        return self._directory

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def sweep_directories(root: Path) -> tuple[Path, ...]:
    """Remove what a killed `kvpool up --ray local` of this user left under `root`; the directories."""
    stale = []
    for path in sorted(root.glob(f"{_PREFIX}*-*")):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(FileNotFoundError):
            if pid.isdecimal() and path.lstat().st_uid == os.getuid() and not path.is_symlink() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)
                stale.append(path)
    return tuple(stale)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM for itself and never gives it back; who had it before gets it again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _require_answer(address: str) -> None:
    """Ray itself would try for minutes. Raises `UnavailableError`."""
    host, _, port = address.rpartition(":")
    if address != "auto":
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise UnavailableError(f"there is no Ray at {address}: {error}") from error


def descendants(root: int) -> set[int]:
    """Process ids of all that `root` started, and of what they started, as of now. Linux; elsewhere none."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rsplit(")", 1)[1].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found: set[int] = set()
    todo = [root]
    while todo:
        todo += (new := children.get(todo.pop(), []))
        found |= set(new)
    return found
