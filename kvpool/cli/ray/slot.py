"""One process of the Ray table as seen from here: what its actor says, put together into a row. Pure; time is an argument."""

from collections.abc import Callable
from typing import Any

from kvpool.cli.procs import ProcessSpec
from kvpool.cli.restart import Backoff
from kvpool.cli.table import ProcessRow
from kvpool.units import SECOND


class Slot:
    """`actor` is whoever keeps the process, `life` the name of its actor's current or latest life.

    waiting --seen running--> running --died--> waiting
                                      --gave up--> ended
    """

    def __init__(self, spec: ProcessSpec, on_event: Callable[[str], None]) -> None:
        """`on_event` gets a line of text for every change."""
        self.spec = spec
        self.actor: Any = None
        self.state = "waiting"
        self.life = ""
        self._on_event = on_event
        self._pid: int | None = None
        self._dead_life = ""
        self._deaths = 0
        self._last_exit = ""
        self._since_s: float | None = None
        self._backoff = Backoff()

    def row(self, now_s: float) -> ProcessRow:
        """The row at `now_s`."""
        return ProcessRow(
            name=self.spec.name,
            role=self.spec.role,
            index=self.spec.index,
            state=self.state,
            pid=self._pid if self.state == "running" else None,
            deaths=self._deaths,
            streak=self._backoff.streak,
            last_exit=self._last_exit,
            since_s=0.0 if self._since_s is None else now_s - self._since_s,
        )

    def looked(self, row: ProcessRow, host: str, life: str, *, asked_s: float, now_s: float) -> None:
        """The actor of `life` on `host`, asked at `asked_s`, said `row` of its process."""
        if life == self._dead_life:
            return
        if self.state == "running" and life != self.life:
            self.died(self.life, "its process or host was lost", now_s)
        if row.state == "running" and self.state != "running":
            self.state, self.life, self._pid, self._since_s = "running", life, row.pid, asked_s - row.since_s
            self._on_event(f"{self.spec.name} started (pid {row.pid} on {host})")
        elif row.state == "ended":
            self.died(life, row.last_exit, now_s)

    def died(self, life: str, reason: str, now_s: float) -> None:
        """The process of `life` is dead. Said again, or of a life that is over, it changes nothing."""
        if not life or life == self._dead_life or (self.state == "running" and life != self.life):
            return
        lived_s = now_s - self._since_s if self.state == "running" and self._since_s is not None else 0.0
        self._backoff.died(int(lived_s * SECOND))
        self.state, self.life, self._dead_life = "waiting", life, life
        self._deaths, self._last_exit, self._since_s = self._deaths + 1, reason, now_s
        self._on_event(f"{self.spec.name} died ({reason}), Ray starts it again")

    def gave_up(self, reason: str, now_s: float) -> None:
        """Ray will not start it again. `reason` is Ray's; that of the death itself is kept if it is known."""
        if self.state == "ended":
            return
        self._last_exit = self._last_exit or reason
        self.state, self._deaths, self._since_s = "ended", max(1, self._deaths), now_s
        self._on_event(f"{self.spec.name} stays down ({self._last_exit})")
