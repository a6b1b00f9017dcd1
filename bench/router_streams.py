"""What the router adds to each token of a thousand streams, and what is left of ten thousand that were aborted.

`python -m bench.router_streams [--streams 1000] [--seconds 20] [--aborted 10000] [--json]`. Four processes: stub workers that say a
token every half second by the real worker protocol (gRPC), a membership server, the router as it is deployed (`python -m router`), and
callers. One clock for all (CLOCK_MONOTONIC), so what a token took is the time at which the caller's socket had it less the time at
which the worker handed it to gRPC: both ends' own share is in it. Tokens count while all streams run.

JSON: `added_p50_ms`, `added_p99_ms`, `added_max_ms`; `tokens` that were measured, `streams` that came through whole;
`router_cpu_us_per_token`, CPU time of the router process while they ran by tokens sent; `rss_mb` at rest, with the streams, after the
first tenth of the aborted ones and after all; `rss_growth`, the last of these over the one before; `aborted`, how many, how many
of these had begun to answer and how many were refused, by status; `aborted_leak`, what a minute at most later is left of them: calls
open at workers, requests in flight and tasks in the router beyond those at rest.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from bench import stream_clients, stream_workers
from bench.report import print_json, print_table
from kvpool.cluster import Membership, open_membership
from kvpool.cluster.child import Child
from kvpool.cluster.embedded import EmbeddedServer
from kvpool.errors import UnavailableError
from kvpool.units import SECOND
from router.testing.model import NAME, write_tiny_model

GAP_S = 0.5
PREFILLS, DECODES = 8, 8
AT_ONCE = 64
"""Aborted streams under way at a time."""
_START_LIMIT_S, _SETTLE_LIMIT_S = 60.0, 60.0
_LETTER = 75


class Rig:
    """A cluster of stub workers, a router, callers."""

    def __init__(self, router: Child, url: str, workers: Connection, callers: Connection) -> None:
        self._router = router
        self._url = url
        self._workers = workers
        self._callers = callers

    def ask(self, whom: str, *command: Any) -> Any:
        """Send a command to "workers" or "callers"; the answer."""
        pipe = self._workers if whom == "workers" else self._callers
        pipe.send(command)
        return pipe.recv()

    def metric(self, name: str) -> float:
        """One of the router's gauges."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"kvpool_router_{name} ")))

    def rss_mb(self) -> float:
        """Resident memory of the router."""
        pages = int(Path(f"/proc/{self._router.pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)

    def cpu_s(self) -> float:
        """CPU time that the router has used."""
        fields = Path(f"/proc/{self._router.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def open(self) -> int:
        """Calls open at workers, requests in flight and tasks in the router."""
        return int(self.ask("workers", "open") + self.metric("in_flight") + self.metric("tasks"))


@contextlib.contextmanager
def rig(streams: int) -> Iterator[Rig]:
    """All processes, for the length of the block."""
    context = get_context("spawn")
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (directory / NAME).mkdir()
        write_tiny_model(directory / NAME, context_tokens=4096)
        store = EmbeddedServer.start(directory, lease_ms=3000)
        stack.callback(store.close)
        membership = stack.enter_context(open_membership(store.url))

        def child(target: Any, *arguments: Any) -> Connection:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
            process.start()
            stack.callback(process.join, 20)
            stack.callback(ours.send, ("end",))
            return ours

        workers = child(stream_workers.serve, store.url, NAME, PREFILLS, DECODES, _LETTER, GAP_S)
        if workers.recv() != "joined":
            raise UnavailableError("the stub workers did not join")
        argv = [sys.executable, "-m", "router", "--cluster", store.url, "--port", "0", "--model", str(directory / NAME)]
        options = ["--max-in-flight", str(2 * streams), "--log-level", "warning"]
        router = Child([*argv, *options], log_path=directory / "router.log")
        stack.callback(router.stop, 20.0)
        url = _await_router(membership)
        callers = child(stream_clients.call, url, NAME)
        yield Rig(router, url, workers, callers)


def _await_router(membership: Membership) -> str:
    deadline_ns = time.monotonic_ns() + int(_START_LIMIT_S * SECOND)
    members = membership.wait(lambda members: any(member.role == "router" for member in members), deadline_ns)
    return next(member.info["url"] for member in members if member.role == "router")


def measure(streams: int, seconds: float, aborted: int) -> dict[str, Any]:
    """The JSON object."""
    with rig(streams) as it:
        it.ask("callers", "aborted", 0, 2 * AT_ONCE, AT_ONCE)  # connections are opened, code is warm
        rest, rss = _settled(it, 0), {"rest": it.rss_mb()}
        it.ask("workers", "take")
        found: dict[str, Any] = {}
        if streams:
            ramp_s = max(2.0, streams / 250)
            cpu_s = it.cpu_s()
            arrived = it.ask("callers", "steady", streams, int((ramp_s + seconds) / GAP_S) + 1, ramp_s)
            rss["streams"] = it.rss_mb()
            sent = it.ask("workers", "take")
            cpu_us = (it.cpu_s() - cpu_s) * 1e6 / max(1, sum(map(len, sent.values())))
            found = {**_added(arrived, sent), "streams": len(arrived), "router_cpu_us_per_token": round(cpu_us, 1)}
            _settled(it, rest)
        if aborted:
            began = it.ask("callers", "aborted", 0, aborted // 10, AT_ONCE)
            _settled(it, rest)
            rss["aborted_tenth"] = it.rss_mb()
            began += it.ask("callers", "aborted", aborted // 10, aborted - aborted // 10, AT_ONCE)
            left = _settled(it, rest)
            rss["aborted"] = it.rss_mb()
            failed = it.ask("callers", "failures")
            growth = round(rss["aborted"] / rss["aborted_tenth"], 3)
            found["aborted"] = {"count": aborted, "answered": began, "failed": failed}
            found |= {"rss_growth": growth, "aborted_leak": max(0, left - rest)}
        return {**found, "rss_mb": rss}


def _added(arrived: dict[int, list[int]], sent: dict[int, list[int]]) -> dict[str, Any]:
    """Milliseconds from a decode worker's hand to a caller's, of tokens sent while all streams ran."""
    from_ns = max(next(filter(None, times)) for times in sent.values() if any(times))
    until_ns = min(times[-1] for times in sent.values() if times)
    pairs = ((came, gone) for stream, times in arrived.items() for came, gone in zip(times, sent[stream], strict=False))
    added = sorted((came - gone) / 1e6 for came, gone in pairs if from_ns <= gone <= until_ns)
    if len(added) < 100:
        raise UnavailableError(f"only {len(added)} tokens came while all streams ran; give more --seconds")
    cuts = statistics.quantiles(added, n=100)
    p50, p99 = round(cuts[49], 3), round(cuts[98], 3)
    return {"added_p50_ms": p50, "added_p99_ms": p99, "added_max_ms": round(added[-1], 3), "tokens": len(added)}


def _settled(it: Rig, rest: int) -> int:
    """What is open once no more of it goes away: `rest`, or what a minute hasn't ended. Without `rest`: once it stands still."""
    deadline_s = time.monotonic() + _SETTLE_LIMIT_S
    before = -1
    while time.monotonic() < deadline_s:
        now = it.open()
        if now <= rest or (not rest and now == before):
            return now
        before = now
        time.sleep(0.5)
    return it.open()


@click.command()
@click.option("--streams", default=1000, show_default=True, help="Streams at once.")
@click.option("--seconds", default=20.0, show_default=True, help="How long they all run.")
@click.option("--aborted", default=10_000, show_default=True, help="Streams to abort.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def main(streams: int, seconds: float, aborted: int, as_json: bool) -> None:
    """What the router adds to each token of many streams."""
    result = measure(streams, seconds, aborted)
    if as_json:
        print_json(result)
    else:
        print_table(("what", "value"), [(name, value) for name, value in result.items()])


if __name__ == "__main__":
    main()
