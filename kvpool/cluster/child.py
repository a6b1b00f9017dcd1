"""A child process that can't outlive this one, and whose death is noticed.

On Linux the kernel sends a child its *parent death signal* when the thread that started it ends. Two consequences shape this
file. A child is started by a keeper thread of its own that then waits for it, so the thread ends exactly when the child
has, or when this process has, `kill -9` included. And the signal is asked for by a small launcher that then becomes the
command by `exec` (same pid): running Python between fork and exec, as `preexec_fn` does, isn't safe in a process with
threads. Children get a session of their own, so a Ctrl-C in the terminal reaches only the process that supervises them.

A pid is signalled only while the child is unreaped, so never after the kernel may have given it to someone else.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvpool.errors import ConfigError, DeadlineError

log = logging.getLogger(__name__)

_LAUNCHER = """
import os, sys
parent, number, *argv = sys.argv[1:]
if sys.platform == "linux":
    import ctypes
    if ctypes.CDLL(None, use_errno=True).prctl(1, int(number), 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit("the parent died before the start")
try:
    os.execvp(argv[0], argv)
except OSError as error:
    print(f"can't start {argv[0]}: {error}", file=sys.stderr)
    sys.exit(127)
"""
KILL_WAIT_S = 10.0
"""How long the kernel may take to end a process after SIGKILL (unmapping a big arena isn't instant)."""


class Child:
    """A running command. Its standard input is empty; its output goes to the end of `log_path`, or to our standard error."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        death_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        """Start it; `death_signal` is what it gets when this process dies.

        Raises `ConfigError` when nothing can be started or the log can't be written.
        """
        self.argv = tuple(argv)
        self._log_path = log_path
        self._env = None if env is None else dict(env)
        self._death_signal = death_signal
        self._callbacks: list[Callable[[int], None]] = []
        self._reaping = threading.Lock()
        self._started = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._start_error: OSError | None = None
        self._keeper = threading.Thread(target=self._keep, name=f"kvpool-keeper-{Path(argv[0]).name}", daemon=True)
        self._keeper.start()
        self._started.wait()
        if self._start_error is not None:
            raise ConfigError(f"can't start {argv[0]}: {self._start_error}") from self._start_error

    @property
    def pid(self) -> int:
        """The process id; keeps its value after the end."""
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._process.returncode if self._process is not None and self._ended.is_set() else None

    def notify(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit_code)` once it has ended, on the keeper thread; at once, on this one, if it has already.

        `wait` returns after the callbacks have, so they must not wait for the child.
        """
        with self._reaping:
            code = self._process.returncode if self._process is not None else None
            if code is None:
                self._callbacks.append(callback)
                return
        callback(code)

    def send_signal(self, number: int) -> bool:
        """Send a signal; False when the process has ended already."""
        with self._reaping:
            if self._process is None or self._process.returncode is not None:
                return False
            os.kill(self._process.pid, number)
            return True

    def wait(self, timeout_s: float) -> int:
        """The exit code, waiting at most `timeout_s`. Raises `DeadlineError`."""
        if not self._ended.wait(max(0.0, timeout_s)):
            raise DeadlineError(f"process {self.pid} ({self.argv[0]}) did not end within {timeout_s:.1f} s")
        code = self.exit_code
        assert code is not None
        return code

    def stop(self, grace_s: float) -> int:
        """SIGTERM, and SIGKILL after `grace_s`; the exit code."""
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(DeadlineError):
            return self.wait(grace_s)
        log.warning("process %d (%s) ignored SIGTERM for %.1f s and is killed", self.pid, self.argv[0], grace_s)
        self.send_signal(signal.SIGKILL)
        return self.wait(KILL_WAIT_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(int(self._death_signal)), *self.argv]
        with contextlib.ExitStack() as stack:
            output: int = sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL
            if self._log_path is not None:
                output = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, output)
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self._env, start_new_session=True)

    def _keep(self) -> None:
        try:
            self._process = self._spawn()
        except OSError as error:
            self._start_error = error
            return
        finally:
            self._started.set()
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            code = self._process.wait()
        try:
            for callback in self._callbacks:
                callback(code)
        finally:
            self._ended.set()
