"""Children end with their parent, whatever ends it, and their output and exit code are kept."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvpool.cluster.child import Child
from kvpool.errors import ConfigError, DeadlineError
from kvpool.testing.membership_kit import eventually

PYTHON = sys.executable


def _gone(pid: int) -> bool:
    """True when no process has this id, or only a zombie that its new parent has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_child_exit_code_and_output_are_kept(tmp_path: Path) -> None:
    """The log holds both streams and survives a restart: it is appended to."""
    log = tmp_path / "log"
    codes: list[int] = []
    for word in ("one", "two"):
        script = f"import sys; print('{word}', flush=True); print('{word}', file=sys.stderr); sys.exit(3)"
        child = Child([PYTHON, "-c", script], log_path=log)
        child.notify(codes.append)
        assert child.wait(30) == 3
        child.notify(codes.append)
    eventually(lambda: codes == [3] * 4, "whoever asked is told, before and after the end")
    assert log.read_text().split() == ["one", "one", "two", "two"]
    assert log.stat().st_mode & 0o077 == 0


def test_child_pid_is_the_command_itself(tmp_path: Path) -> None:
    """The launcher becomes the command: a signal to the pid reaches it, not a wrapper."""
    log = tmp_path / "log"
    child = Child([PYTHON, "-c", "import os; print(os.getpid(), os.getsid(0))"], log_path=log)
    child.wait(30)
    assert log.read_text().split() == [str(child.pid)] * 2


def test_child_killed_by_a_signal_reports_it_and_takes_no_more() -> None:
    """After the end no signal is sent: the pid may belong to somebody else."""
    child = Child([PYTHON, "-c", "import time; time.sleep(600)"])
    assert child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    assert child.exit_code == -signal.SIGKILL
    assert not child.send_signal(signal.SIGKILL)


def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """Stopping always ends."""
    log = tmp_path / "log"
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    child = Child([PYTHON, "-c", script], log_path=log)
    eventually(lambda: log.read_text() != "", "the child is deaf")
    assert child.stop(0.05) == -signal.SIGKILL


def test_child_wait_past_its_deadline_raises() -> None:
    """A wait has an end even when the child has none."""
    child = Child([PYTHON, "-c", "import time; time.sleep(600)"])
    with pytest.raises(DeadlineError, match=str(child.pid)):
        child.wait(0.01)
    assert child.stop(30) == -signal.SIGTERM


def test_child_of_a_missing_program_says_so(tmp_path: Path) -> None:
    """A typing mistake shows in the exit code and the log."""
    log = tmp_path / "log"
    assert Child(["/no/such/program"], log_path=log).wait(30) == 127
    assert "/no/such/program" in log.read_text()


def test_child_with_an_unwritable_log_is_a_config_error(tmp_path: Path) -> None:
    """Nothing is started whose words would be lost."""
    with pytest.raises(ConfigError):
        Child([PYTHON, "-c", ""], log_path=tmp_path / "missing" / "log")


_PARENT = """
import sys, time
from kvpool.cluster.child import Child
child = Child([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_child_ends_with_its_parent(number: signal.Signals) -> None:
    """`kill -9` of the parent leaves no orphan: the kernel sees to it."""
    with subprocess.Popen([PYTHON, "-c", _PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not _gone(pid)
        os.kill(parent.pid, number)
    eventually(lambda: _gone(pid), "the child is gone")


def test_child_outlives_the_thread_that_asked_for_it() -> None:
    """The death signal is tied to a thread; it must be the keeper's, not the caller's."""
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(Child([PYTHON, "-c", "import time; time.sleep(600)"])))
    thread.start()
    thread.join()
    (child,) = children
    with pytest.raises(DeadlineError):
        child.wait(0.3)
    child.stop(30)
