"""The terminal of `kvpool up`: events scroll by, tables of processes, workers and nodes stay below and follow the cluster."""

import asyncio
import threading

from rich.console import Console, Group, RenderableType
from rich.live import Live

from kvpool.cli.screen import nodes_table, processes_table, workers_table
from kvpool.cli.snapshot import Snapshot, take_snapshot
from kvpool.cli.supervisor import LocalCluster
from kvpool.cli.up import PlainScreen
from kvpool.cluster import Member

SNAPSHOT_EVERY_S = 2.0
_ASK_TIMEOUT_S = 1.0


class LiveScreen(PlainScreen):
    """Rich tables on a terminal. Members are asked on a thread of their own, so a slow one doesn't freeze the picture."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console()
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._snapshot = Snapshot(nodes=(), workers=(), routers=())
        self._members: tuple[Member, ...] = ()
        self._closed = threading.Event()
        self._asking = threading.Thread(target=self._ask, name="kvpool-live", daemon=True)
        self._asking.start()

    def say(self, line: str) -> None:
        """Print a line above the tables; any thread."""
        self._console.print(line, markup=False, highlight=False)

    def show(self, cluster: LocalCluster) -> None:
        """Draw the cluster as it is now."""
        self._members = cluster.membership.members()
        parts: list[RenderableType] = [processes_table(cluster.rows())]
        if self._snapshot.workers:
            parts.append(workers_table(self._snapshot.workers))
        if self._snapshot.nodes:
            parts.append(nodes_table(self._snapshot.nodes))
        self._live.update(Group(*parts, f"{cluster.url}   Ctrl-C stops"), refresh=True)

    def close(self) -> None:
        """Take the tables away."""
        self._closed.set()
        self._live.stop()
        self._asking.join(timeout=2 * _ASK_TIMEOUT_S)

    def _ask(self) -> None:
        while not self._closed.wait(SNAPSHOT_EVERY_S):
            workers_and_nodes = tuple(member for member in self._members if member.role != "router")
            self._snapshot = asyncio.run(take_snapshot(workers_and_nodes, _ASK_TIMEOUT_S))
