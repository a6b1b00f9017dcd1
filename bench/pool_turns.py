"""The driver's side of `bench.pool`: contestants are started, do their cases in turns, and are stopped. See `bench/peers/turns.py`."""

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpool.errors import DeadlineError, UnavailableError

ROOT = Path(__file__).parents[1]
START_S = 120.0
TURN_S = 120.0
_END_S = 5.0
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: seconds of each operation, and the CPU seconds of all of them at the client and at who serves it."""

    seconds: tuple[float, ...]
    client_cpu_s: float
    server_cpu_s: float

    @property
    def p50_s(self) -> float:
        """Of its operations."""
        return statistics.median(self.seconds)


class Contestant:
    """A process that takes turns, with its children in a process group of its own."""

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        """Start it; `wait_ready` comes next."""
        self._log = log
        self._command = " ".join(argv)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )
        self._unread = b""
        self.name = self.version = ""
        self.cases: Mapping[str, int] = {}
        """Bytes that one operation of each case moves."""
        self.servers: tuple[int, ...] = ()
        self.spins = False
        """Whether it uses CPU while it is idle, so that it must be stopped between its turns."""

    def wait_ready(self) -> None:
        """Until it has said who it is. Raises `UnavailableError` with its last words when it can't take part."""
        told = self._answer(time.monotonic() + START_S)
        self.name, self.version, self.cases = told["name"], told["version"], told["cases"]
        self.servers, self.spins = tuple(told["servers"]), bool(told.get("spins"))
        self._rest()

    def turn(self, case: str, ops: int) -> Turn:
        """Do a case `ops` times."""
        return next(take_turn([self], {"case": case, "ops": ops}))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run although it isn't its turn."""
        self._wake()
        yield
        self._rest()

    def order(self, order: Mapping[str, object]) -> None:
        """Tell it what to do; `answer` has what came of it."""
        self._wake()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> Turn:
        """Of the order before."""
        told = self._answer(time.monotonic() + TURN_S)
        self._rest()
        return Turn(tuple(told["seconds"]), told["client_cpu_s"], told["server_cpu_s"])

    def close(self) -> None:
        """End it and what it has started."""
        self._wake()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        with contextlib.suppress(ProcessLookupError):  # all of its children may have ended, too
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stdout.close()

    def _wake(self) -> None:
        if self.spins:
            os.killpg(self._process.pid, signal.SIGCONT)

    def _rest(self) -> None:
        """Who spins while idle would take a core from the others."""
        if self.spins:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def _answer(self, end: float) -> Any:
        """The next line that is an answer; libraries print lines of their own."""
        while not (line := self._line(end)).startswith(b"{"):
            pass
        return json.loads(line)

    def _line(self, end: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            ended = self._process.poll() is not None  # its children may keep the pipe open
            ready, _, _ = select.select([self._process.stdout], [], [], 0.0 if ended else _LOOK_S)
            more = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not more and (ready or ended):
                words = self._log.read_text(errors="replace").strip().splitlines()
                raise UnavailableError(words[-1] if words else "it ended without a word")
            if not more and time.monotonic() > end:
                raise DeadlineError(f"{self._command} took too long")
            self._unread += more
        line, self._unread = self._unread.split(b"\n", 1)
        return line


def take_turn(contestants: Sequence[Contestant], order: Mapping[str, object]) -> Iterator[Turn]:
    """The turns of several that are told at the same time to do the same."""
    for one in contestants:
        one.order(order)
    return iter([one.answer() for one in contestants])


@contextmanager
def started(commands: Mapping[str, Sequence[str]], logs: Path) -> Iterator[tuple[list[Contestant], dict[str, str]]]:
    """Start all at once; those that can take part, in order, and why others are missing."""
    all_of_them: dict[str, Contestant] = {}
    missing: dict[str, str] = {}
    try:
        for name, argv in commands.items():
            all_of_them[name] = Contestant(argv, logs / f"{name.replace(' ', '-')}.log")
        for name, one in all_of_them.items():
            try:
                one.wait_ready()
            except (UnavailableError, DeadlineError) as error:
                missing[name] = str(error)
        yield [one for name, one in all_of_them.items() if name not in missing], missing
    finally:
        for one in all_of_them.values():
            one.close()
