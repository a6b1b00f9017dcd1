"""Keeps a table of processes running: starts them, notices deaths, starts again after a backoff, stops all in order.

One thread owns the table's decisions; deaths are reported by the keeper thread of each child. Life cycle of one entry::

    waiting --due--> running --death--> waiting     (restarts on, not stopping)
                             --death--> ended       (otherwise)
"""

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvpool.cli.procs import ProcessSpec
from kvpool.cli.restart import Backoff
from kvpool.clock import seconds_left
from kvpool.cluster.child import KILL_WAIT_S, Child
from kvpool.errors import ConfigError, DeadlineError
from kvpool.units import MIB, SECOND

log = logging.getLogger(__name__)

LOG_LIMIT_BYTES = 32 * MIB
"""A log that grows beyond is moved to `<name>.log.1`, so a cluster's logs stay under twice this per process."""
_HOUSEKEEPING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRow:
    """One process as it stands: `state` is running, waiting (for its next start) or ended; `since_s` how long it has been so.

    `deaths` counts those nobody asked for, `streak` the latest ones in a row.
    """

    name: str
    role: str
    index: int
    state: str
    pid: int | None
    deaths: int
    streak: int
    last_exit: str
    since_s: float


class Table(Protocol):
    """Whoever keeps the processes running; the methods are those of `ProcessTable`."""

    def adopt(self, spec: ProcessSpec, child: Child) -> None:
        """Take over a process that runs already."""

    def start(self) -> None:
        """Start everything."""

    def rows(self) -> tuple[ProcessRow, ...]:
        """The table as it stands."""

    def pids(self, role: str) -> list[int]:
        """Process ids by index."""

    def kill(self, role: str, index: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal to one process; its pid."""

    def hurry(self) -> None:
        """Cut the grace of a stop."""

    def stop(self, grace_s: float = 10.0) -> None:
        """Stop all."""


class _Entry:
    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.state = "waiting"
        self.due_ns = time.monotonic_ns()
        self.since_ns = self.due_ns
        self.deaths = 0
        self.last_exit = ""
        self.backoff = Backoff()

    def row(self, now_ns: int) -> ProcessRow:
        return ProcessRow(
            name=self.spec.name,
            role=self.spec.role,
            index=self.spec.index,
            state=self.state,
            pid=self.child.pid if self.child is not None and self.state == "running" else None,
            deaths=self.deaths,
            streak=self.backoff.streak,
            last_exit=self.last_exit,
            since_s=(now_ns - self.since_ns) / SECOND,
        )


class ProcessTable:
    """The processes of `specs`, each with its log `log_dir`/NAME.log. `on_event` gets one line of text per change of state.

    `on_pid(pid, alive)` hears of every start and end, from one thread at a time. Both must not call back into the table.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        log_dir: Path,
        restart: bool = True,
        on_event: Callable[[str], None] | None = None,
        on_pid: Callable[[int, bool], None] | None = None,
    ) -> None:
        self._entries = [_Entry(spec) for spec in specs]
        self._log_dir = log_dir
        self._restart = restart
        self._on_event = on_event or log.info
        self._on_pid = on_pid or (lambda pid, alive: None)
        self._changed = threading.Condition(threading.RLock())
        self._stopping = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-supervisor", daemon=True)

    def adopt(self, spec: ProcessSpec, child: Child) -> None:
        """Take over a process that runs already; when it dies it is started again as `spec` says. Only before `start`."""
        entry = _Entry(spec)
        self._entries.insert(0, entry)
        with self._changed:
            self._started(entry, child)

    def start(self) -> None:
        """Start everything, in order, on the table's thread."""
        self._thread.start()

    def rows(self) -> tuple[ProcessRow, ...]:
        """The table as it stands."""
        now_ns = time.monotonic_ns()
        with self._changed:
            return tuple(entry.row(now_ns) for entry in self._entries)

    def pids(self, role: str) -> list[int]:
        """Process ids of the running processes of `role`, by index."""
        return [row.pid for row in self.rows() if row.role == role and row.pid is not None]

    def kill(self, role: str, index: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal to one process; its pid. After SIGKILL its death is known when this returns.

        Raises `ConfigError` when there is no such process or it isn't running.
        """
        with self._changed:
            entry = next((entry for entry in self._entries if (entry.spec.role, entry.spec.index) == (role, index)), None)
            if entry is None:
                raise ConfigError(f"there is no process {role}-{index}")
            child = entry.child
            if child is None or not child.send_signal(number):
                raise ConfigError(f"{entry.spec.name} is not running")
        if number == signal.SIGKILL:
            child.wait(KILL_WAIT_S)
        return child.pid

    def hurry(self) -> None:
        """Make a `stop` under way, or to come, kill at once what hasn't ended."""
        self._hurry.set()

    def stop(self, grace_s: float = 10.0) -> None:
        """Stop all: rank by rank SIGTERM, and SIGKILL for what is left after `grace_s`. Ends with every child reaped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        for rank in sorted({entry.spec.stop_rank for entry in self._entries}):
            self._stop_rank([entry for entry in self._entries if entry.spec.stop_rank == rank], grace_s)

    def _stop_rank(self, entries: list[_Entry], grace_s: float) -> None:
        children = [(entry.spec.name, entry.child) for entry in entries if entry.child is not None and entry.state == "running"]
        for _, child in children:
            child.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for name, child in children:
            while child.exit_code is None and time.monotonic() < deadline and not self._hurry.is_set():
                try:
                    child.wait(min(0.05, grace_s))
                except DeadlineError:
                    continue
            if child.exit_code is None:
                self._on_event(f"{name} did not end in time and is killed")
                child.send_signal(signal.SIGKILL)
                child.wait(KILL_WAIT_S)

    def _run(self) -> None:
        checked_ns = time.monotonic_ns()
        while True:
            with self._changed:
                if self._stopping:
                    return
                now_ns = time.monotonic_ns()
                for entry in self._entries:
                    if entry.state == "waiting" and entry.due_ns <= now_ns:
                        self._begin(entry)
                due = [entry.due_ns for entry in self._entries if entry.state == "waiting"]
                left_s = min([_HOUSEKEEPING_S, *(seconds_left(due_ns) for due_ns in due)])
                self._changed.wait(left_s)
            if time.monotonic_ns() - checked_ns > _HOUSEKEEPING_S * SECOND:
                checked_ns = time.monotonic_ns()
                self._bound_logs()

    def _begin(self, entry: _Entry) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        try:
            child = Child(entry.spec.argv, log_path=self._log_dir / f"{entry.spec.name}.log", env=environment)
        except ConfigError as error:
            self._ended(entry, str(error))
            return
        self._started(entry, child)

    def _started(self, entry: _Entry, child: Child) -> None:
        entry.child, entry.state, entry.since_ns = child, "running", time.monotonic_ns()
        self._on_pid(child.pid, True)
        self._on_event(f"{entry.spec.name} started (pid {child.pid})")
        child.notify(lambda code: self._died(entry, child, code))

    def _died(self, entry: _Entry, child: Child, code: int) -> None:
        with self._changed:
            self._on_pid(child.pid, False)
            self._ended(entry, _describe_exit(code))
            self._changed.notify_all()

    def _ended(self, entry: _Entry, reason: str) -> None:
        now_ns = time.monotonic_ns()
        delay_ns = entry.backoff.died(now_ns - entry.since_ns if entry.state == "running" else 0)
        entry.deaths += not self._stopping
        entry.last_exit, entry.since_ns = reason, now_ns
        if self._stopping:
            entry.state = "ended"
            self._on_event(f"{entry.spec.name} ended ({reason})")
        elif self._restart:
            entry.state, entry.due_ns = "waiting", now_ns + delay_ns
            self._on_event(f"{entry.spec.name} died ({reason}), starting again in {delay_ns / SECOND:.1f} s")
        else:
            entry.state = "ended"
            self._on_event(f"{entry.spec.name} died ({reason}) and stays down")

    def _bound_logs(self) -> None:
        for entry in self._entries:
            path = self._log_dir / f"{entry.spec.name}.log"
            if path.exists() and path.stat().st_size > LOG_LIMIT_BYTES:
                shutil.copyfile(path, path.with_name(path.name + ".1"))
                os.truncate(path, 0)  # the process appends, so it goes on at the start


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"killed by signal {-code}"
    return f"exit code {code}"
