"""A child process that serves a node's bytes, started again when it dies.

Theory. A data plane lives in a process of its own for two reasons: what its peers do to it must not hurt the node, and a node that is busy
in Python must not slow transfers. The child says one line once it serves, the offer; it ends with its standard input, that is, with the
node, however that ends. A watcher waits for its end and starts another one, sooner or later (`_PAUSES_S`); meanwhile there is no offer, and
clients take another reach.

A child that *beats* writes a byte now and then. When it has been silent for `silence_s` it is killed: one that was stopped for a while must
not wake up and write what nobody waits for any more.
"""

import logging
import os
import select
import subprocess
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvpool.errors import ConfigError

_log = logging.getLogger(__name__)

_START_S: Final = 30.0
_STOP_S: Final = 5.0
_PAUSES_S: Final = (0.1, 1.0, 5.0, 30.0)
_BEATS: Final = 4096

T = TypeVar("T")


class NursedProcess(Generic[T]):
    """Runs `command` until closed; `parse` makes the offer of the line it prints.

    `name` is for people: "the NAME data plane". `hint` says what to do when the first child can't serve, for the `ConfigError` raised then
    (its reasons are on standard error). `silence_s` None: the child doesn't beat.
    """

    def __init__(
        self, command: Sequence[str], parse: Callable[[bytes], T], *, name: str, hint: str, silence_s: float | None = None
    ) -> None:
        self._nurse = _Nurse(command, parse, name, hint, silence_s)
        self._finish = weakref.finalize(self, self._nurse.stop)

    @property
    def offer(self) -> T | None:
        """What others need to reach the arena; another one after each restart, None while no child serves."""
        return self._nurse.offer

    @property
    def pid(self) -> int:
        """The process that serves, or served last."""
        return self._nurse.child.pid

    @property
    def restarts(self) -> int:
        """How often a child has died and another taken its place."""
        return self._nurse.restarts

    def close(self) -> None:
        """End the child; twice is fine."""
        self._finish()


class _Nurse(Generic[T]):
    """The child and the thread that watches it; knows nothing of the `NursedProcess`, so that the latter can be collected."""

    def __init__(self, command: Sequence[str], parse: Callable[[bytes], T], name: str, hint: str, silence_s: float | None) -> None:
        self._command = list(command)
        self._parse = parse
        self._name = name
        self._silence_s = silence_s
        self._process = os.getpid()
        self._stopping = threading.Event()
        self.restarts = 0
        self.offer: T | None = None
        self.child = self._spawn()
        self.offer = self._hear(self.child)
        if self.offer is None:
            code = _end(self.child)
            _close(self.child)
            raise ConfigError(f"the {name} data plane did not start (exit code {code}, see above): {hint}")
        self._watcher = threading.Thread(target=self._watch, name=f"kvpool-{name}-nurse", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        if os.getpid() != self._process:
            return
        self._stopping.set()
        self.offer = None
        _end(self.child)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_STOP_S)
        _close(self.child)

    def _watch(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._listen(self.child)
            code = self.child.wait()
            self.offer = None
            if self._stopping.is_set():
                return
            pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
            _log.error("the %s data plane ended with exit code %s; another one starts in %.1f s", self._name, code, pause_s)
            if self._stopping.wait(pause_s):
                return
            self._replace()
            failures = 0 if self.offer is not None else failures + 1

    def _listen(self, child: "subprocess.Popen[bytes]") -> None:
        """Until a child that beats has ended, or was killed because it doesn't any more."""
        if self._silence_s is None or child.stdout is None:
            return
        while select.select([child.stdout], [], [], self._silence_s)[0]:
            if not os.read(child.stdout.fileno(), _BEATS):
                return
        _log.error("the %s data plane has said nothing for %.0f s and is killed", self._name, self._silence_s)
        child.kill()

    def _replace(self) -> None:
        """Start the next child, unless we are being stopped."""
        _close(self.child)
        child = self._spawn()
        self.child = child
        if self._stopping.is_set():  # stop() may have ended the one before
            _end(child)
            return
        self.restarts += 1
        offer = self._hear(child)
        if offer is None or self._stopping.is_set():
            _end(child)
        else:
            self.offer = offer

    def _spawn(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def _hear(self, child: "subprocess.Popen[bytes]") -> T | None:
        """The offer the child prints once it serves; None if it ends first or takes longer than `_START_S`."""
        if child.stdout is None or not select.select([child.stdout], [], [], _START_S)[0]:
            return None
        line = child.stdout.readline()
        return self._parse(line) if line else None


def _end(child: "subprocess.Popen[bytes]") -> int:
    """Close the child's input, wait, kill if need be; the exit code. Twice is fine."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        code = child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    return code


def _close(child: "subprocess.Popen[bytes]") -> None:
    """Let go of a child that has ended."""
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            stream.close()
