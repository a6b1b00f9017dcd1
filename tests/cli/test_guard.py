"""The guard finishes what a killed supervisor leaves, and only that."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from kvpool.cli.guard import Guard, finish, follow
from kvpool.cluster.child import Child
from kvpool.testing.membership_kit import eventually

Script = Callable[[str], tuple[str, ...]]
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def _close(watched: dict[int, int] | None) -> None:
    for fd in (watched or {}).values():
        os.close(fd)


def test_guard_after_a_goodbye_has_nothing_to_do() -> None:
    """A supervisor that stopped in good order needs no help."""
    watched = follow(io.StringIO(f"watch {os.getpid()}\ngoodbye\n"))
    assert watched is None


def test_guard_without_a_goodbye_holds_those_not_forgotten() -> None:
    """Children that ended before, or were never there, are no concern."""
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    watched = follow(io.StringIO(f"watch {os.getpid()}\nwatch {os.getppid()}\nwatch {gone.pid}\nforget {os.getppid()}\n"))
    assert watched is not None
    assert list(watched) == [os.getpid()]
    _close(watched)


def test_guard_kills_only_what_stays(script: Script, tmp_path: Path) -> None:
    """Who ends by itself within the grace isn't killed; who hangs is."""
    log = tmp_path / "log"
    deaf, ending = Child(script(DEAF), log_path=log), Child(script("import time; time.sleep(600)"))
    eventually(lambda: log.read_text() != "", "the deaf one is deaf")
    watched = follow(io.StringIO(f"watch {deaf.pid}\nwatch {ending.pid}\n"))
    assert watched is not None
    ending.send_signal(signal.SIGTERM)
    deaf.send_signal(signal.SIGTERM)
    assert ending.wait(30) == -signal.SIGTERM
    assert finish(watched, 0.1) == [deaf.pid]
    assert deaf.wait(30) == -signal.SIGKILL
    _close(watched)


def test_guard_process_ends_with_a_goodbye_and_says_nothing(tmp_path: Path) -> None:
    """A clean stop leaves no guard behind."""
    guard = Guard.start(tmp_path / "guard.log")
    assert guard is not None
    guard.watch(os.getpid())
    guard.close()
    assert (tmp_path / "guard.log").read_text() == ""


def test_guard_that_died_is_survived(tmp_path: Path) -> None:
    """Losing the guard costs a warning, not the cluster."""
    guard = Guard.start(tmp_path / "guard.log")
    assert guard is not None
    os.kill(guard.pid, signal.SIGKILL)
    guard._process.wait(30)
    guard.watch(os.getpid())
    guard.forget(os.getpid())
    guard.close()


_SUPERVISOR = """
import sys, time
from pathlib import Path
from kvpool.cli.guard import Guard
from kvpool.cluster.child import Child
guard = Guard.start(Path(sys.argv[1]) / "guard.log")
child = Child([sys.executable, "-c", sys.argv[2]], log_path=Path(sys.argv[1]) / "child.log")
guard.watch(child.pid)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_guard_finishes_a_hanging_child_of_a_killed_supervisor(tmp_path: Path) -> None:
    """`kill -9` of the supervisor, a child that ignores its death signal: nobody is left."""
    with subprocess.Popen([sys.executable, "-c", _SUPERVISOR, str(tmp_path), DEAF], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        eventually(lambda: "up" in (tmp_path / "child.log").read_text(), "the child is deaf")
        supervisor.kill()
    eventually(lambda: "killed" in (tmp_path / "guard.log").read_text(), "the guard did its work")
    assert f"killed [{pid}]" in (tmp_path / "guard.log").read_text()
