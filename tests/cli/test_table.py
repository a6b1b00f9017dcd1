"""The table of processes with tiny real children: restart, backoff, shutdown, logs."""

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpool.cli import table as table_module
from kvpool.cli.procs import ProcessSpec
from kvpool.cli.table import ProcessTable
from kvpool.errors import ConfigError
from kvpool.testing.membership_kit import eventually

Script = Callable[[str], tuple[str, ...]]
SLEEP = "import time; print('up', flush=True); time.sleep(600)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


class World:
    """Makes tables, keeps their events, and stops them at the end."""

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self.events: list[str] = []
        self.pids: list[tuple[int, bool]] = []
        self._tables: list[ProcessTable] = []

    def table(self, *specs: ProcessSpec, restart: bool = True) -> ProcessTable:
        table = ProcessTable(
            specs,
            log_dir=self.log_dir,
            restart=restart,
            on_event=self.events.append,
            on_pid=lambda pid, alive: self.pids.append((pid, alive)),
        )
        self._tables.append(table)
        table.start()
        return table

    def up(self, name: str) -> None:
        log = self.log_dir / f"{name}.log"
        eventually(lambda: log.exists() and "up" in log.read_text(), f"{name} is up")

    def close(self) -> None:
        for table in self._tables:
            table.hurry()
            table.stop()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_table_starts_all_in_order_and_lists_them(world: World, script: Script) -> None:
    """What runs is known by role and index."""
    table = world.table(*(ProcessSpec(role=role, index=i, argv=script(SLEEP)) for role, i in (("node", 0), ("decode", 0), ("decode", 1))))
    eventually(lambda: len(table.pids("decode")) == 2, "both decode processes run")
    assert [event.split()[0] for event in world.events] == ["node-0", "decode-0", "decode-1"]
    assert len({*table.pids("node"), *table.pids("decode")}) == 3
    assert table.pids("router") == []


def test_table_restarts_what_was_killed(world: World, script: Script) -> None:
    """The new process takes the dead one's place; the others are left alone."""
    table = world.table(*(ProcessSpec(role="decode", index=i, argv=script(SLEEP)) for i in (0, 1)))
    eventually(lambda: len(table.pids("decode")) == 2, "both run")
    other = table.pids("decode")[1]
    old = table.kill("decode", 0)
    eventually(lambda: len(table.pids("decode")) == 2 and table.pids("decode")[0] != old, "the dead one is replaced")
    assert table.pids("decode")[1] == other
    (row, _) = table.rows()
    assert (row.deaths, row.last_exit) == (1, "killed by SIGKILL")
    assert "decode-0 died (killed by SIGKILL), starting again in 0.5 s" in world.events
    assert world.pids[:3] == [(old, True), (other, True), (old, False)]


def test_table_backs_off_from_what_keeps_dying(world: World, script: Script) -> None:
    """Each death in a row doubles the wait; the exit code and the last words are kept."""
    table = world.table(ProcessSpec(role="node", index=0, argv=script("print('no memory'); raise SystemExit(3)")))
    eventually(lambda: table.rows()[0].streak >= 3, "it died three times")
    waits = [event for event in world.events if "starting again" in event]
    assert waits[:3] == [f"node-0 died (exit code 3), starting again in {delay} s" for delay in ("0.5", "1.0", "2.0")]
    assert (world.log_dir / "node-0.log").read_text().splitlines()[:2] == ["no memory"] * 2


def test_table_without_restarts_leaves_the_dead(world: World, script: Script) -> None:
    """`--no-restart` is for looking at what happened."""
    table = world.table(ProcessSpec(role="node", index=0, argv=script("raise SystemExit(3)")), restart=False)
    eventually(lambda: table.rows()[0].state == "ended", "it stays down")
    assert world.events[-1] == "node-0 died (exit code 3) and stays down"
    with pytest.raises(ConfigError, match="not running"):
        table.kill("node")


def test_table_stop_goes_rank_by_rank(world: World, script: Script) -> None:
    """What serves others ends after them."""
    graceful = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit(0)); print('up', flush=True); time.sleep(600)"
    table = world.table(*(ProcessSpec(role=f"r{rank}", index=0, argv=script(graceful), stop_rank=rank) for rank in (3, 1, 2)))
    for rank in (1, 2, 3):
        world.up(f"r{rank}-0")
    table.stop()
    assert [event for event in world.events if "ended" in event] == [f"r{rank}-0 ended (exit code 0)" for rank in (1, 2, 3)]
    assert [row.deaths for row in table.rows()] == [0, 0, 0]


def test_table_stop_kills_what_ignores_it(world: World, script: Script) -> None:
    """A deaf process costs its grace and no more."""
    table = world.table(ProcessSpec(role="node", index=0, argv=script(DEAF)))
    world.up("node-0")
    table.stop(grace_s=0.1)
    assert world.events[-2:] == ["node-0 did not end in time and is killed", "node-0 ended (killed by SIGKILL)"]


def test_table_hurry_cuts_a_stop_under_way(world: World, script: Script) -> None:
    """The second Ctrl-C doesn't wait for a grace of an hour."""
    table = world.table(ProcessSpec(role="node", index=0, argv=script(DEAF)))
    world.up("node-0")
    stopping = threading.Thread(target=table.stop, args=(3600,))
    stopping.start()
    table.hurry()
    stopping.join(30)
    assert not stopping.is_alive()
    assert table.rows()[0].state == "ended"


def test_table_stop_while_waiting_for_a_restart_starts_nothing(world: World, script: Script) -> None:
    """A shutdown isn't overtaken by a restart that was due."""
    table = world.table(ProcessSpec(role="node", index=0, argv=script("raise SystemExit(3)")))
    eventually(lambda: table.rows()[0].state == "waiting" and table.rows()[0].deaths > 0, "it waits for its restart")
    table.stop()
    assert table.pids("node") == []
    assert not table._thread.is_alive()


def test_table_signals_reach_the_process(world: World, script: Script) -> None:
    """Any signal can be sent, to the index asked for only; a name that isn't in the table is an error."""
    table = world.table(ProcessSpec(role="node", index=0, argv=script(SLEEP)))
    eventually(lambda: table.pids("node") != [], "it runs")
    table.kill("node", 0, signal.SIGTERM)
    eventually(lambda: table.rows()[0].deaths == 1, "it died of it")
    with pytest.raises(ConfigError, match="node-7"):
        table.kill("node", 7)


def test_table_moves_a_log_that_grew_too_big(world: World, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs of a cluster that runs for weeks stay bounded, and the process goes on writing."""
    monkeypatch.setattr(table_module, "LOG_LIMIT_BYTES", 1000)
    monkeypatch.setattr(table_module, "_HOUSEKEEPING_S", 0.05)
    chatty = "import time\nfor i in range(10**6):\n    print('up', i, flush=True)\n    time.sleep(0.001)"
    world.table(ProcessSpec(role="node", index=0, argv=script(chatty)))
    moved = world.log_dir / "node-0.log.1"
    eventually(moved.exists, "the log was moved")
    assert moved.read_text().startswith("up 0\n")
    eventually(lambda: (world.log_dir / "node-0.log").read_text() not in ("", moved.read_text()), "it goes on in a fresh one")
