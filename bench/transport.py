"""Bytes between a client and a node's arena, beside what the machine can do: one memcpy, and plain TCP sockets.

`python -m bench.transport [--json] [--rounds 7]`. The owner of the arena is another process, and so is the far end of the sockets. All
cases take turns round by round; a figure is the median over the rounds of each round's p50, beside the lowest and the highest. A batch
is 32 runs of 1 MiB that are not adjacent in the arena; a small transfer is one run of 64 KiB. The sockets answer one request with all the
bytes of the batch, each run sent and received straight from and to the same kind of memory. `tcp get` is the same batch as frames by their
keys, without a lease.
"""

import argparse
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from bench.report import Spread, print_json, print_table, spread
from kvpool.cli.bench.limits import receive
from kvpool.testing.arena_owner import ArenaOwner, frame_key
from kvpool.transport import Reach, Run, ShmReach
from kvpool.transport.reach import Bytes
from kvpool.transport.tcp import TcpReach
from kvpool.transport.ucx import UcxReach
from kvpool.units import KIB, MIB, SECOND

ARENA = 96 * MIB
SMALL = (Run(5 * MIB, 64 * KIB, 0),)
BATCH = tuple(Run(2 * index * MIB + 4096, MIB, index * MIB) for index in range(32))
SHAPES = {"64KiB": SMALL, "32x1MiB": BATCH}
OPS = {"64KiB": 60, "32x1MiB": 3, "512 keys": 60}
PROBED = tuple((index * 8 * KIB, 8 * KIB) for index in range(512))
IDLE_S = 5.0
_REQUEST = struct.Struct("<cI")
_AS = {"get": "read"}

Case = Callable[[], object]


class RawTcp:
    """Plain sockets: the far end holds an array, sends runs of it or takes them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, runs: Sequence[Run], into: Bytes) -> None:
        """As `Reach.read`."""
        self._connection.sendall(_request(b"r", runs))
        for run in runs:
            receive(self._connection, into.data[run.at : run.at + run.length])

    def write(self, runs: Sequence[Run], source: Bytes) -> None:
        """As `Reach.write`."""
        self._connection.sendall(_request(b"w", runs))
        for run in runs:
            self._connection.sendall(source.data[run.at : run.at + run.length])
        receive(self._connection, memoryview(bytearray(1)))


def _request(kind: bytes, runs: Sequence[Run]) -> bytes:
    return _REQUEST.pack(kind, len(runs)) + np.array([(run.offset, run.length) for run in runs], "<u8").tobytes()


def serve_raw(port: int) -> None:
    """The far end of `RawTcp`, until its client hangs up."""
    arena = np.ones(ARENA, np.uint8).data
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = bytearray(_REQUEST.size)
        while connection.recv_into(head, 1, socket.MSG_PEEK):
            receive(connection, memoryview(head))
            kind, count = _REQUEST.unpack(head)
            table = np.zeros((count, 2), "<u8")
            receive(connection, table.data.cast("B"))
            for offset, length in table.tolist():
                view = arena[offset : offset + length]
                if kind == b"r":
                    connection.sendall(view)
                else:
                    receive(connection, view)
            if kind == b"w":
                connection.sendall(b"k")


@contextmanager
def raw_tcp() -> Iterator[RawTcp]:
    """A connected `RawTcp` with its far end in another process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        command = [sys.executable, "-m", "bench.transport", "--serve-raw", str(server.getsockname()[1])]
        with subprocess.Popen(command) as far:
            connection, _ = server.accept()
            connection.settimeout(60)
            with connection:
                yield RawTcp(connection)
            far.wait(60)


def memcpy(runs: Sequence[Run], into: Bytes, arena: Bytes) -> None:
    """The yardstick for `shm`: the same bytes inside one process, by the same single-threaded numpy copy."""
    for offset, length, at in runs:
        np.copyto(into[at : at + length], arena[offset : offset + length])


def make_cases(reaches: Mapping[str, Reach], raw: RawTcp) -> dict[tuple[str, str, str], Case]:
    """(way, direction, shape) to the call that does it once."""
    buffer, arena = np.ones(32 * MIB, np.uint8), np.ones(ARENA, np.uint8)
    cases: dict[tuple[str, str, str], Case] = {}
    for shape, runs in SHAPES.items():
        cases["memcpy", "read", shape] = lambda runs=runs: memcpy(runs, buffer, arena)  # type: ignore[misc]
        cases["raw tcp", "read", shape] = lambda runs=runs: raw.read(runs, buffer)  # type: ignore[misc]
        cases["raw tcp", "write", shape] = lambda runs=runs: raw.write(runs, buffer)  # type: ignore[misc]
        for name, reach in reaches.items():
            for direction, move in (("read", reach.read), ("write", reach.write)):
                cases[name, direction, shape] = lambda move=move, runs=runs: move(  # type: ignore[misc]
                    runs, buffer, lease_id=0, deadline_ns=time.monotonic_ns() + 60 * SECOND
                )
    return cases


def keyed_cases(reach: TcpReach) -> dict[tuple[str, str, str], Case]:
    """The same for frames by their keys, and for asking whether 512 are there."""
    buffer, empty = np.ones(32 * MIB, np.uint8), np.zeros(0, np.uint8)
    cases: dict[tuple[str, str, str], Case] = {}
    for shape, runs in SHAPES.items():
        wants = [(frame_key(run.offset, run.length), run.length, empty, buffer[run.at : run.at + run.length]) for run in runs]
        cases["tcp", "get", shape] = lambda wants=wants: _all(reach.get(wants, time.monotonic_ns() + 60 * SECOND))  # type: ignore[misc]
    keys = [frame_key(*frame) for frame in PROBED]
    cases["tcp", "probe", "512 keys"] = lambda: _all(reach.probe(keys, time.monotonic_ns() + 60 * SECOND))
    return cases


def _all(found: Sequence[int]) -> None:
    if not all(found):
        raise AssertionError("a frame that the owner has was not found")


def p50_in_turns(cases: Mapping[tuple[str, str, str], Case], rounds: int) -> dict[tuple[str, str, str], list[float]]:
    """Each case's p50 in seconds, one a round; a first round warms up, uncounted."""
    medians: dict[tuple[str, str, str], list[float]] = {key: [] for key in cases}
    for counted in [False] + [True] * rounds:
        for key, run in cases.items():
            seconds = []
            for _ in range(OPS[key[2]]):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
            if counted:
                medians[key].append(statistics.median(seconds))
    return medians


def cpu_seconds(pid: int) -> float:
    """CPU time the process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_cpu_percent(pid: int) -> float:
    """Share of one core the connected but idle process uses over `IDLE_S`."""
    before = cpu_seconds(pid)
    time.sleep(IDLE_S)
    return 100 * (cpu_seconds(pid) - before) / IDLE_S


def total(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.transport", description="Latency and rate of the reaches.")
    parser.add_argument("--rounds", type=int, default=7, help="at least 5")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--serve-raw", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_raw is not None:
        serve_raw(args.serve_raw)
        return
    if args.rounds < 5:
        parser.error("--rounds must be at least 5")
    with ExitStack() as stack:
        frames = [(run.offset, run.length) for run in SMALL + BATCH]
        owner = stack.enter_context(ArenaOwner(ARENA, ucx=True, tcp=True, frames=[*frames, *PROBED]))
        ucx, tcp = UcxReach(owner.ucx_offer()), TcpReach(owner.tcp_peer())
        reaches: dict[str, Reach] = {"shm": ShmReach(owner.map()), "ucx": ucx, "tcp": tcp}
        for reach in reaches.values():
            stack.callback(reach.close)
        cases = make_cases(reaches, stack.enter_context(raw_tcp())) | keyed_cases(tcp)
        seconds = p50_in_turns(cases, args.rounds)
        transports = ucx.transports
        idle = idle_cpu_percent(owner.pid)
    report(seconds, transports, idle, args.rounds, as_json=args.json)


def report(
    seconds: dict[tuple[str, str, str], list[float]], transports: tuple[str, ...], idle: float, rounds: int, *, as_json: bool
) -> None:
    """The table, and the JSON object if wanted."""
    us = {key: spread([value * 1e6 for value in values]) for key, values in seconds.items() if key[2] != "32x1MiB"}
    rate = {key: spread([total(BATCH) / value / 1e9 for value in values]) for key, values in seconds.items() if key[2] == "32x1MiB"}
    rows = []
    for way, direction in dict.fromkeys(key[:2] for key in rate):
        batch = rate[way, direction, "32x1MiB"]
        to_tcp = f"{batch.median / rate['raw tcp', _AS.get(direction, direction), '32x1MiB'].median:.2f}x"
        to_memcpy = f"{batch.median / rate['memcpy', 'read', '32x1MiB'].median:.2f}x"
        rows.append((f"{way} {direction}", us[way, direction, "64KiB"], batch, to_memcpy, to_tcp))
    print(f"p50, median of {rounds} rounds (range); ucx over {', '.join(transports) or 'unknown'}; idle target: {idle:.2f} % of one core")
    print_table(("way", "64 KiB, us", "32 x 1 MiB, GB/s", "to memcpy", "to raw tcp"), rows)
    print(f"tcp probe of 512 keys: {us['tcp', 'probe', '512 keys']} us")
    if as_json:
        figures: dict[str, Spread] = {}
        for (way, direction, shape), value in {**us, **rate}.items():
            unit = "gbps" if shape == "32x1MiB" else "us"
            figures[f"{way}_{direction}_{shape}_{unit}".replace(" ", "_")] = value
        ratios = {
            "shm_read_to_memcpy": rate["shm", "read", "32x1MiB"].median / rate["memcpy", "read", "32x1MiB"].median,
            "ucx_read_to_raw_tcp": rate["ucx", "read", "32x1MiB"].median / rate["raw tcp", "read", "32x1MiB"].median,
            "ucx_write_to_raw_tcp": rate["ucx", "write", "32x1MiB"].median / rate["raw tcp", "write", "32x1MiB"].median,
            "tcp_get_to_raw_tcp": rate["tcp", "get", "32x1MiB"].median / rate["raw tcp", "read", "32x1MiB"].median,
            "tcp_read_to_raw_tcp": rate["tcp", "read", "32x1MiB"].median / rate["raw tcp", "read", "32x1MiB"].median,
            "tcp_write_to_raw_tcp": rate["tcp", "write", "32x1MiB"].median / rate["raw tcp", "write", "32x1MiB"].median,
        }
        print_json({"bench": "transport", "rounds": rounds, "ucx_transports": transports, "idle_cpu_percent": idle, **figures, **ratios})


if __name__ == "__main__":
    main()
