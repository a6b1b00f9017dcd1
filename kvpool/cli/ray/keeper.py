"""The actor that keeps one process: Ray places and restarts the actor, the actor has the process as its child.

A child that dies takes its actor along, and Ray starts another, on another host if this one is gone. An actor that dies takes its
child along: the kernel sends it SIGTERM (`kvpool.cluster.child`), and a guard process finishes one that ignores it. Ray ends the
actors when its driver or its host's raylet has died. So whatever is killed, nothing is left.
"""

import os
import sys
import threading
from pathlib import Path

from kvpool.cli.guard import Guard
from kvpool.cli.procs import ProcessSpec
from kvpool.cli.ray.placement import located
from kvpool.cli.table import ProcessRow, ProcessTable

LAST_WORDS_S = 0.5
"""How long an actor outlives its child, so that whoever looks in that time learns why it ended."""


class Keeper:
    """One process of the cluster, in an actor. Methods may run on several threads at once."""

    def __init__(self, spec: ProcessSpec, log_dir: str, host: str | None) -> None:
        """Start `spec` at `host`, by default at this host's address as Ray knows it; its log is `log_dir`/NAME.log."""
        from kvpool.cli.ray.engine import host_address

        directory = Path(log_dir)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._host = host or host_address()
        self._stopping = False
        self._guard = Guard.start(directory / f"{spec.name}.guard.log")
        self._table = ProcessTable(
            [located(spec, python=sys.executable, host=self._host)],
            log_dir=directory,
            restart=False,
            on_pid=self._on_pid,
        )
        self._table.start()

    def look(self) -> tuple[ProcessRow, str, str]:
        """The process as it stands, its host, and a name of this life of the actor."""
        (row,) = self._table.rows()
        return row, self._host, f"{self._host}/{os.getpid()}"

    def kill(self, number: int) -> tuple[ProcessRow, str, str]:
        """Send the process a signal; how it stood before, as `look`. After SIGKILL its death is known when this returns."""
        before = self.look()
        self._table.kill(before[0].role, before[0].index, number)
        return before

    def hurry(self) -> None:
        """Cut the grace of a `stop` under way."""
        self._table.hurry()

    def stop(self, grace_s: float) -> tuple[ProcessRow, str, str]:
        """End the process: SIGTERM, SIGKILL after `grace_s`; as `look`, afterwards. The actor stays, to be killed by who asked."""
        self._stopping = True
        self._table.stop(grace_s)
        if self._guard is not None:
            self._guard.close()
        return self.look()

    def _on_pid(self, pid: int, alive: bool) -> None:
        if alive and self._guard is not None:
            self._guard.watch(pid)
        elif not alive:
            if self._guard is not None:
                self._guard.forget(pid)
            leaving = threading.Timer(LAST_WORDS_S, self._leave)
            leaving.daemon = True
            leaving.start()

    def _leave(self) -> None:
        if not self._stopping:
            os._exit(1)
