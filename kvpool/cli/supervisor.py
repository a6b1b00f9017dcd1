"""A whole cluster on this machine: membership server, pool nodes, workers and router, kept running by this process.

    with LocalCluster(ClusterOptions(nodes=1, port=0)) as cluster:
        cluster.wait_ready()
        requests go to cluster.url, members are found at cluster.cluster_url

`start` returns at once; `wait_ready` returns when every member has joined and the router answers /health. What dies is started
again; `stop` ends everything in order (router, workers, nodes, membership server) and leaves nothing in shared memory. Should
this process be killed, its children end with it (`kvpool.cluster.child`) and the guard finishes those that hang.

Who keeps the processes running is exchangeable: `ProcessTable` here, or Ray on many machines (`kvpool.cli.ray`).
"""

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from kvpool.cli.credentials import security
from kvpool.cli.guard import SHARED_MEMORY, Guard
from kvpool.cli.http import healthy
from kvpool.cli.procs import ClusterOptions, ProcessSpec, local_processes, roles_to_await
from kvpool.cli.state import ClusterState, clear_state, write_state
from kvpool.cli.table import ProcessRow, ProcessTable, Table
from kvpool.cluster import ROLES, Member, Membership, open_membership
from kvpool.cluster.embedded import EmbeddedServer, server_argv, server_binary
from kvpool.cluster.url import DEFAULT_LEASE_MS
from kvpool.errors import ClosedError, ConfigError, DeadlineError, UnavailableError
from kvpool.units import SECOND

READY_TIMEOUT_S = 300.0
"""The first start may convert a model; loading it takes seconds."""
HOPELESS_STREAK = 3
"""So many deaths in a row of one process before the cluster was ever complete: it won't become so by waiting."""
EMPTY_TIMEOUT_NS = 10 * SECOND
"""Members that died just before are listed until their lease runs out."""
_POLL_S = 0.1
_TAIL_LINES = 12

Processes = Callable[[ClusterOptions, str], Sequence[ProcessSpec]]


class LocalCluster:
    """The cluster described by `options`. A context manager: entering starts it, leaving stops it."""

    def __init__(
        self,
        options: ClusterOptions | None = None,
        *,
        log_dir: Path | None = None,
        state_file: Path | None = None,
        on_event: Callable[[str], None] | None = None,
        processes: Processes = local_processes,
        lease_ms: int = DEFAULT_LEASE_MS,
        membership_url: str | None = None,
        table: Callable[..., Table] = ProcessTable,
    ) -> None:
        """`log_dir` defaults to a fresh temporary directory, kept only when something went wrong; with `state_file` other commands
        find this cluster.

        `processes` lists the processes for (options, cluster URL), `table` keeps them running; `on_event` gets a line for every change.
        With `membership_url` the members meet at that server, which is not ours to run, and may be on other machines.
        """
        self.options = options or ClusterOptions()
        self.log_dir = log_dir or Path(tempfile.mkdtemp(prefix="kvpool-logs-"))
        self._own_log_dir = log_dir is None
        self._state_file = state_file
        self._on_event = on_event
        self._processes = processes
        self._lease_ms = lease_ms
        self._server: EmbeddedServer | None = None
        self._membership_url = membership_url
        self._make_table = table
        self._table: Table | None = None
        self._membership: Membership | None = None
        self._guard: Guard | None = None
        self._arrivals: dict[tuple[str, str, int], float] = {}
        self._was_ready = False
        self._url = ""

    @property
    def url(self) -> str:
        """The router's base URL, such as `http://127.0.0.1:8000`. Of a router on another machine it is known once that has joined."""
        if self._membership_url is not None and self._membership is not None:
            self._url = next((member.info["url"] for member in self._membership.members("router") if "url" in member.info), self._url)
        return self._url

    @property
    def cluster_url(self) -> str:
        """Where the members meet: the embedded membership server, or the one that was given."""
        if self._membership_url is not None:
            return self._membership_url
        if self._server is None:
            raise ClosedError("the cluster is not running; call start() first")
        return self._server.url

    @property
    def membership(self) -> Membership:
        """This process's view of the cluster."""
        if self._membership is None:
            raise ClosedError("the cluster is not running; call start() first")
        return self._membership

    def start(self) -> None:
        """Start every process and return. Raises `ConfigError` or `UnavailableError` when that can't even begin."""
        if self._table is not None:
            raise ConfigError("the cluster was started already")
        self.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        options = self.options
        if self._membership_url is None:
            if options.port:
                _require_free(options.host, options.port)
            options = _with_port(options)
            scheme = "http" if security().tls_cert is None else "https"  # the router gets its certificate from the environment, as we do
            self._url = f"{scheme}://{options.host}:{options.port}"
            self._server = EmbeddedServer.start(self.log_dir, lease_ms=self._lease_ms, log_name="membership-0.log")
        self._guard = Guard.start(self.log_dir / "guard.log")
        specs = self._processes(options, self.cluster_url)
        table = self._make_table(
            specs, log_dir=self.log_dir, restart=self.options.restart, on_event=self._on_event, on_pid=self._tell_guard
        )
        if self._server is not None:
            argv = tuple(server_argv(server_binary(), self.log_dir, self._server.port))
            table.adopt(ProcessSpec(role="membership", index=0, argv=argv, stop_rank=99), self._server.child)
        self._membership = open_membership(self.cluster_url)
        if self._membership_url is not None:
            _require_empty(self._membership)
        if self.options.copies > 1:
            self._membership.configure(lambda config: replace(config, copies=self.options.copies))
        self._membership.subscribe(self._note_arrivals)
        self._table = table
        table.start()
        if self._state_file is not None:
            state = ClusterState(cluster_url=self.cluster_url, router_url=self._url, pid=os.getpid(), log_dir=str(self.log_dir))
            write_state(self._state_file, state)

    def ready(self) -> bool:
        """True when every process runs and has joined, and the router is healthy. Raises `UnavailableError` when it never will be."""
        all_run = all(row.state == "running" for row in self.rows())
        if all_run and self.membership.connected and not self._missing() and healthy(self.url, timeout_s=2.0):
            self._was_ready = True
            return True
        if not self._was_ready:
            self._raise_if_hopeless()
        return False

    @property
    def over(self) -> bool:
        """True when no process runs and none will be started again: restarts are off, or who started them is gone."""
        rows = [row for row in self.rows() if row.role in ROLES]
        return bool(rows) and all(row.state == "ended" for row in rows)

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until `ready()`. Raises `DeadlineError` naming what is missing, `UnavailableError` as `ready` does."""
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() >= deadline:
                missing = ", ".join(f"{count} {role}" for role, count in self._missing().items()) or "a healthy router"
                raise DeadlineError(f"the cluster was not ready within {timeout_s:.0f} s, missing: {missing}; logs are in {self.log_dir}")
            time.sleep(_POLL_S)

    def rows(self) -> tuple[ProcessRow, ...]:
        """Every process as it stands."""
        return () if self._table is None else self._table.rows()

    def pids(self, role: str) -> list[int]:
        """Process ids of `role` (membership, node, prefill, decode or router), by index; those running."""
        return [] if self._table is None else self._table.pids(role)

    def kill(self, role: str, index: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal to one process; its pid. What dies of it is started again unless restarts are off.

        After SIGKILL, `ready()` is False from when this returns until the successor has joined.
        """
        if self._table is None:
            raise ClosedError("the cluster is not running")
        return self._table.kill(role, index, number)

    def hurry(self) -> None:
        """Cut the grace of a `stop` under way."""
        if self._table is not None:
            self._table.hurry()

    def stop(self, grace_s: float = 10.0) -> None:
        """End everything, within about `grace_s` per kind of process. A second call does nothing."""
        if self._membership is not None:
            self._membership.close()
        if self._table is not None:
            self._table.stop(grace_s)
        elif self._server is not None:
            self._server.close()
        if self._guard is not None:
            self._guard.close()
        if self._table is not None:
            from kvpool.tier import reap_stale  # loads numpy, which nothing else here needs

            reap_stale(SHARED_MEMORY)
            if self._own_log_dir and self._was_ready and not any(row.deaths for row in self._table.rows()):
                shutil.rmtree(self.log_dir, ignore_errors=True)
        if self._state_file is not None:
            clear_state(self._state_file, os.getpid())
        self._membership = self._table = self._server = self._guard = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _tell_guard(self, pid: int, alive: bool) -> None:
        if self._guard is not None:
            if alive:
                self._guard.watch(pid)
            else:
                self._guard.forget(pid)

    def _note_arrivals(self, members: tuple[Member, ...]) -> None:
        """Remember when each life of a member was first seen; forget those that left."""
        now_s = time.monotonic()
        lives = {(member.role, member.id, member.incarnation) for member in members}
        self._arrivals = {life: self._arrivals.get(life, now_s) for life in sorted(lives)}

    def _missing(self) -> dict[str, int]:
        """How many processes of each role have yet to join since their latest start, or how many members are dead but still listed."""
        now_s, rows, arrivals = time.monotonic(), self.rows(), self._arrivals
        missing: dict[str, int] = {}
        for role, count in roles_to_await(rows, ROLES).items():
            starts = [now_s - row.since_s for row in rows if row.role == role and row.state == "running"]
            arrived = [at_s for (of, _, _), at_s in arrivals.items() if of == role]
            missing[role] = max(count - joined(starts, arrived), len(arrived) - count)
        return {role: count for role, count in missing.items() if count}

    def _raise_if_hopeless(self) -> None:
        for row in self.rows():
            if row.state == "ended" or row.streak >= HOPELESS_STREAK:
                words = _last_words(self.log_dir / f"{row.name}.log")
                raise UnavailableError(f"{row.name} does not stay up ({row.last_exit}); its last words in {self.log_dir}:\n{words}")


def joined(starts: Sequence[float], arrivals: Sequence[float]) -> int:
    """How many of the processes started at `starts` can be among the members first seen at `arrivals` (same clock).

    Each process needs a member of its own that appeared after it; the latest starts have the smallest choice, so they choose first.
    """
    free = sorted(arrivals)
    matched = 0
    for start in sorted(starts, reverse=True):
        if free and free[-1] > start:
            free.pop()
            matched += 1
    return matched


def _require_empty(membership: Membership) -> None:
    """A server of others may hold members of others, which can't be told from ours. Raises `ConfigError`, `UnavailableError`."""
    if not membership.connected:
        raise UnavailableError("the membership server given with --cluster can't be reached")
    try:
        membership.wait(lambda view: not view, time.monotonic_ns() + EMPTY_TIMEOUT_NS)
    except DeadlineError as error:
        found = len(membership.members())
        raise ConfigError(f"this cluster has {found} members already; end them or take another name, --cluster URL?cluster=NAME") from error


def _with_port(options: ClusterOptions) -> ClusterOptions:
    """`options` with a port that is free now in place of 0. It stays the same over restarts of the router."""
    if options.port:
        return options
    with socket.socket() as probe:
        probe.bind((options.host, 0))
        return replace(options, port=int(probe.getsockname()[1]))


def _require_free(host: str, port: int) -> None:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"can't listen at {host}:{port}: {error.strerror}; choose another --port, or 0 for any free one") from error


def _last_words(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            text = file.read().decode(errors="replace")
    except OSError:
        return "(nothing)"
    return "\n".join(f"  {line}" for line in text.splitlines()[-_TAIL_LINES:]) or "(nothing)"
