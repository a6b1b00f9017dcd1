"""The last one to leave: a tiny process that finishes a cluster whose supervisor was killed.

When the supervisor dies by `kill -9`, the kernel sends every child its death signal, SIGTERM, and a healthy child cleans up and
ends. A child that hangs would stay. The guard holds a pipe from the supervisor; when the pipe closes without a goodbye it
gives the children a few seconds, kills what is left, and sweeps up shared memory of dead nodes. It knows children by pidfd,
opened while they ran, so it can't hit a stranger that was given an old pid. Linux only; elsewhere there is none.

Lines on the pipe: `watch PID`, `forget PID`, `goodbye`.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

log = logging.getLogger(__name__)

GRACE_S = 10.0
_CLOSE_WAIT_S = 5.0
SHARED_MEMORY = Path("/dev/shm")


class Guard:
    """The supervisor's end of the pipe. Not thread-safe; every method is quick and none raises for a guard that died."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @classmethod
    def start(cls, log_path: Path) -> "Guard | None":
        """Start one; None where the platform has no pidfd."""
        if not hasattr(os, "pidfd_open"):
            return None
        with log_path.open("a") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvpool.cli.guard"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                text=True,
            )
        return cls(process)

    @property
    def pid(self) -> int:
        """The guard's process id."""
        return self._process.pid

    def watch(self, pid: int) -> None:
        """Finish `pid` when the supervisor dies."""
        self._say(f"watch {pid}")

    def forget(self, pid: int) -> None:
        """`pid` has ended."""
        self._say(f"forget {pid}")

    def close(self) -> None:
        """The supervisor ends in good order: nothing is left to guard."""
        self._say("goodbye")
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_CLOSE_WAIT_S)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            log.warning("the guard process is gone (%s): should this process be killed, hanging children would stay", error)


def follow(lines: TextIO) -> dict[int, int] | None:
    """Read the pipe to its end: the pidfds of the children left behind, by pid; None after a goodbye."""
    watched: dict[int, int] = {}
    for line in lines:
        word, _, number = line.strip().partition(" ")
        if word == "goodbye":
            return None
        pid = int(number)
        if word == "watch" and pid not in watched:
            with contextlib.suppress(ProcessLookupError):
                watched[pid] = os.pidfd_open(pid)
        elif word == "forget" and pid in watched:
            os.close(watched.pop(pid))
    return watched


def finish(watched: dict[int, int], grace_s: float) -> list[int]:
    """Wait up to `grace_s` for the processes behind the pidfds to end and kill the others; the pids that had to be killed."""
    deadline = time.monotonic() + grace_s
    alive = dict(watched)
    while alive and (left_s := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(list(alive.values()), [], [], left_s)
        alive = {pid: fd for pid, fd in alive.items() if fd not in ended}
    for fd in alive.values():
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    for fd in alive.values():
        select.select([fd], [], [], _CLOSE_WAIT_S)
    return sorted(alive)


def main() -> None:
    """Run as the guard: follow the pipe on standard input, then finish what is left."""
    watched = follow(sys.stdin)
    if watched is None:
        return
    killed = finish(watched, GRACE_S)
    from kvpool.tier import reap_stale  # only now: a guard that has nothing to do stays small

    swept = reap_stale(SHARED_MEMORY)
    print(f"the supervisor died; killed {killed or 'nobody'}, swept {len(swept)} arenas", flush=True)


if __name__ == "__main__":
    main()
