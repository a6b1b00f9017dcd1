"""The workers as processes: they start from flags, say where they serve, and end clean on a signal."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvpool.cluster import open_membership
from kvpool.cluster.embedded import EmbeddedServer
from kvpool.request import DecodeRequest, PrefillRequest, TokenOut
from kvpool.units import SECOND
from kvpool.wire.worker_client import WorkerClient

SERVES = re.compile(r"worker for (\S+) serves at (\S+)")


class Worker:
    """A running worker and what it has said so far."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[str] = []
        self._told = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, pattern: "re.Pattern[str]") -> "re.Match[str]":
        """The first line that matches, within a minute."""
        end = time.monotonic() + 60
        with self._told:
            while True:
                if found := next((m for line in self.lines if (m := pattern.search(line))), None):
                    return found
                alive = self._reader.is_alive()
                assert alive, "the worker ended:\n" + "".join(self.lines)
                assert self._told.wait(end - time.monotonic()), "not said within a minute:\n" + "".join(self.lines)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(30)
        self._reader.join(10)
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._told:
                self.lines.append(line)
                self._told.notify_all()
        with self._told:
            self._told.notify_all()


@contextmanager
def started(role: str, *flags: str) -> Iterator[Worker]:
    with running([sys.executable, "-m", f"{role}_worker", *flags]) as worker:
        yield worker


@contextmanager
def running(command: list[str]) -> Iterator[Worker]:
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            yield Worker(process)
        finally:
            if process.poll() is None:
                process.kill()


def test_worker_processes_join_serve_and_leave(tiny: Path, tmp_path: Path) -> None:
    """From the command line to the first token and back: exit 0, and no member stays behind."""
    flags = ("--model", str(tiny), "--served-model-name", "tiny", "--block-tokens", "8")
    with EmbeddedServer.start(tmp_path) as server, open_membership(server.url) as membership:
        with started("prefill", "--cluster", server.url, *flags) as prefill, started("decode", "--cluster", server.url, *flags) as decode:
            membership.wait(lambda view: {m.role for m in view} == {"prefill", "decode"}, time.monotonic_ns() + 60 * SECOND)
            addresses = [worker.wait_for(SERVES)[2] for worker in (prefill, decode)]
            assert [membership.members(role)[0].address for role in ("prefill", "decode")] == addresses
            assert asyncio.run(_tokens(*addresses)) == 3
            assert [prefill.stop(), decode.stop(signal.SIGINT)] == [0, 0]
        assert membership.wait(lambda view: not view, time.monotonic_ns() + 10 * SECOND) == ()


async def _tokens(prefill_address: str, decode_address: str) -> int:
    """How many tokens a request gets after its first one, with no pool node alive."""
    prefill, decode = WorkerClient(prefill_address), WorkerClient(decode_address)
    try:
        first, _ = [e async for e in prefill.prefill(PrefillRequest(request_id="r", prompt=(1, 2, 3)), 30)]
        request = DecodeRequest(request_id="r", prompt=(1, 2, 3), generated=(first.token,), max_tokens=4)  # type: ignore[union-attr]
        return len([e async for e in decode.decode(request, 30) if isinstance(e, TokenOut)])
    finally:
        await prefill.close()
        await decode.close()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--model", "no-such-model"), "unknown model 'no-such-model'"),
        (("--kv-memory", "lots"), "not a size"),
        (("--cluster", "http://x"), "a cluster URL starts with"),
        (("--dtype", "int8"), "Invalid value for '--dtype'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_worker_process_with_a_wrong_flag_says_so_and_fails(flags: tuple[str, ...], complaint: str) -> None:
    """One line that says what to do, no traceback."""
    with started("decode", *flags) as worker:
        status = worker.process.wait(60)
        worker.wait_for(re.compile(re.escape(complaint)))
    assert status != 0
    assert "Traceback" not in "".join(worker.lines)


def test_worker_process_stopped_while_loading_exits_0(tiny: Path) -> None:
    """A supervisor that changes its mind early must not see a failure."""
    with started("decode", "--model", str(tiny)) as worker:
        # Signals mean something from the moment Python has read the flags; its imports take longest, so ask until it is gone.
        end = time.monotonic() + 60
        while b"decode_worker" not in Path(f"/proc/{worker.process.pid}/cmdline").read_bytes() or not _handles_sigterm(worker.process.pid):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert worker.stop() == 0


def _handles_sigterm(pid: int) -> bool:
    """Has the process a handler of its own for SIGTERM?"""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)
