"""A process of the read proof, from both ends: it works until its standard input ends, and says twice a second what it has done so far.

What it says is a line of JSON with its counts; what went wrong, in words, under `what`. A killed one has said most of it before.
"""

import json
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

_EVERY_S: Final = 0.5
_START_S: Final = 60.0
_GRACE_S: Final = 30.0


def work(step: Callable[[], None], done: Callable[[], Counter[str]], what: Sequence[str] = ()) -> None:
    """In the child: one step after the other until the parent closes standard input, or there is something wrong."""
    _say(Counter(), what)
    said = time.monotonic()
    while not what and not select.select([sys.stdin], [], [], 0)[0]:
        step()
        if time.monotonic() - said > _EVERY_S:
            said = time.monotonic()
            _say(done(), what)
    _say(done(), what)


def _say(done: Counter[str], what: Sequence[str]) -> None:
    print(json.dumps({"done": done, "what": list(what)}), flush=True)


class Child:
    """`python -m MODULE ARGUMENTS…`. It may be stopped and killed at any time by `process`."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.module = module
        self.process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._last: dict[str, Any] = {"done": {}, "what": []}
        self._ready = threading.Event()
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()

    def wait_ready(self) -> None:
        """Until it works. Raises `AssertionError` when it doesn't come to that."""
        if not self._ready.wait(_START_S) or self.crashed:
            raise AssertionError(f"{self.module} did not start")

    @property
    def crashed(self) -> bool:
        """Whether it ended by itself with an error."""
        return bool(self.process.poll())

    @property
    def done(self) -> Counter[str]:
        """Its counts so far."""
        return Counter(self._last["done"])

    @property
    def what(self) -> list[str]:
        """What was wrong, in words."""
        return list(self._last["what"])

    def kill(self) -> None:
        """As `kill -9`."""
        self.process.kill()
        self._reap()

    def ask_to_end(self) -> None:
        """Close its standard input."""
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()

    def end(self) -> None:
        """Let it finish, if it does within a time; then its counts are whole."""
        self.ask_to_end()
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reap()

    def _reap(self) -> None:
        self.ask_to_end()
        self.process.wait()
        self._hearing.join(_GRACE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def _hear(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                if line.endswith(b"\n"):
                    self._last = json.loads(line)
                self._ready.set()
        self._ready.set()
