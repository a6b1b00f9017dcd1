"""The node's end in a process of its own, started again when it dies.

Theory. Two things speak against serving an arena from inside the node. UCX aborts the process in states it did not foresee, and what a peer
does can bring it there (`lane.py` tells of one such state and avoids it); a node must not die of its peers. And over TCP a byte only moves
while the target's thread runs, so a node busy in Python would slow every transfer. So a child maps the arena's file and serves it; it ends
with its standard input, that is, with the node, however that ends. A watcher waits for the child and starts another one, sooner or
later (`_PAUSES_S`); meanwhile there is no offer, and clients take another reach.
"""

import json
import logging
import os
import select
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Final

from kvpool.errors import ConfigError
from kvpool.transport.offer import UcxOffer

_log = logging.getLogger(__name__)

_START_S: Final = 30.0
_STOP_S: Final = 5.0
_PAUSES_S: Final = (0.1, 1.0, 5.0, 30.0)


class UcxTargetProcess:
    """Serves `length` bytes at `data_offset` of the arena file at `path` until closed.

    Raises `ConfigError` when the first child can't serve it: no usable UCX, most often (its reasons are on standard error).
    """

    def __init__(self, path: str | Path, data_offset: int, length: int) -> None:
        self._nurse = _Nurse([str(Path(path).absolute()), str(data_offset), str(length)])
        self._finish = weakref.finalize(self, self._nurse.stop)

    @property
    def offer(self) -> UcxOffer | None:
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


class _Nurse:
    """The child and the thread that watches it; knows nothing of the `UcxTargetProcess`, so that the latter can be collected."""

    def __init__(self, arguments: list[str]) -> None:
        self._command = [sys.executable, "-m", "kvpool.transport.ucx.serve", *arguments]
        self._process = os.getpid()
        self._stopping = threading.Event()
        self.restarts = 0
        self.offer: UcxOffer | None = None
        self.child = self._spawn()
        self.offer = self._hear(self.child)
        if self.offer is None:
            code = _end(self.child)
            raise ConfigError(
                f"the UCX data plane did not start (exit code {code}, see above): install UCX, or leave ucx out of the offers"
            )
        self._watcher = threading.Thread(target=self._watch, name="kvpool-ucx-nurse", daemon=True)
        self._watcher.start()

    def stop(self) -> None:
        if os.getpid() != self._process:
            return
        self._stopping.set()
        self.offer = None
        _end(self.child)
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_STOP_S)

    def _watch(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            code = self.child.wait()
            self.offer = None
            if self._stopping.is_set():
                return
            pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
            _log.error("the UCX data plane ended with exit code %s; another one starts in %.1f s", code, pause_s)
            if self._stopping.wait(pause_s):
                return
            self._replace()
            failures = 0 if self.offer is not None else failures + 1

    def _replace(self) -> None:
        """Start the next child, unless we are being stopped."""
        _end(self.child)
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
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _hear(self, child: "subprocess.Popen[bytes]") -> UcxOffer | None:
        """The offer the child prints once it serves; None if it ends first or takes longer than `_START_S`."""
        if child.stdout is None or not select.select([child.stdout], [], [], _START_S)[0]:
            return None
        line = child.stdout.readline()
        return decode_offer(line) if line else None


def encode_offer(offer: UcxOffer) -> str:
    """One line of JSON."""
    said = {"address": offer.worker_address.hex(), "rkey": offer.rkey.hex(), "base": offer.base_address, "length": offer.length}
    return json.dumps(said)


def decode_offer(line: str | bytes) -> UcxOffer:
    """The offer in a line of `encode_offer`."""
    said = json.loads(line)
    return UcxOffer(
        worker_address=bytes.fromhex(said["address"]), rkey=bytes.fromhex(said["rkey"]), base_address=said["base"], length=said["length"]
    )


def _end(child: "subprocess.Popen[bytes]") -> int:
    """Close the child's input, wait, kill if need be; the exit code. Twice is fine."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        code = child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        code = child.wait()
    if child.stdout is not None:
        child.stdout.close()
    return code
