"""Real node processes for tests: started, found, killed."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

SERVES = re.compile(r"node ([0-9a-f]{32}) serves .* at (\S+) over")
DEADLINE_S = 60


class NodeProcess:
    """One `python -m kvpool.node`, or of another `module` that ends as one; `address` and `node_id` are known once it serves."""

    def __init__(self, *flags: str, arena_dir: Path | None = None, module: str = "kvpool.node") -> None:
        where = ["--arena-dir", str(arena_dir)] if arena_dir else []
        command = [sys.executable, "-m", module, *where, *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.node_id = self.address = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(DEADLINE_S) or not self.address:
            self.stop()
            raise AssertionError("the node did not start:\n" + "".join(self.log))

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """As `kill -9`."""
        self.signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def stop(self) -> int:
        """SIGTERM and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            status = self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait(DEADLINE_S)
        self._reader.join(5)
        if self.process.stderr is not None:
            self.process.stderr.close()
        return status

    def _read(self) -> None:
        for line in self._lines():
            self.log.append(line)
            found = SERVES.search(line)
            if found:
                self.node_id, self.address = found.groups()
                self._ready.set()
        self._ready.set()

    def _lines(self) -> Iterator[str]:
        assert self.process.stderr is not None
        try:
            yield from self.process.stderr
        except ValueError:  # closed by stop()
            return


def poll(condition: object, what: str, deadline_s: float = 30) -> None:
    """Wait until `condition()` holds."""
    end = time.monotonic() + deadline_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)
