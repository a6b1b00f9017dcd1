"""A contestant's side of `bench.pool`: a process that does a case when it is told to and says how long each time took.

Theory. Everything that is compared is a process of its own: kvpool's client, every peer's client, the yardsticks. All speak this
protocol over their standard input and output, one JSON object a line, so that one driver can let them take turns round by round
and nobody is measured in another way than the others. First the contestant says who it is and what it can do:

    {"name": "redis", "version": "9.1.2", "cases": {"get_64k": 65536, ...}, "servers": [4711]}

`cases` maps a case to the bytes that one operation moves, `servers` are the process ids that serve it. Then for each order
`{"case": "get_64k", "ops": 200}` it answers `{"seconds": [...], "client_cpu_s": ..., "server_cpu_s": ...}`; one operation before them warms
up, uncounted. `{"case": ..., "start": T, "stop": T}` instead does as many operations as it can between two times of `time.monotonic()`.
The end of its input is the end of its turns. Nothing here needs more than the standard library.
"""

import ctypes
import json
import mmap
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvpool.cli.bench.cpu import cpu_s_of, own_cpu_s

KIB, MIB = 1 << 10, 1 << 20
SMALL, LARGE, BATCH, PROBED = 64 * KIB, MIB, 32, 512
WORKING_SETS = 4
"""Batches that take turns, so that what is read is not in a cache only because it was read a moment ago."""
SMALL_KEYS = 64
COPIED = "copy_32x1m"
"""The case that copies what `get_32x1m` reads, without a store between."""
_READY_S = 30.0


@dataclass(frozen=True)
class Case:
    """`run(i)` does operation number i, never the same i twice; it moves `nbytes`.

    Untimed, before and after a turn: `prepare(range)` of the operations to come, where their number is known, and `finish()`.
    """

    run: Callable[[int], object]
    nbytes: int = 0
    finish: Callable[[], object] = lambda: None
    prepare: Callable[[range], object] = lambda coming: None


def take_turns(name: str, version: str, cases: Mapping[str, Case], servers: Sequence[int] = (), **about: object) -> None:
    """Say who this is, then obey orders until the input ends."""
    known = {case: one.nbytes for case, one in cases.items()}
    _say({"name": name, "version": version, "cases": known, "servers": list(servers), **about})
    done = dict.fromkeys(cases, 0)
    for line in sys.stdin:
        order = json.loads(line)
        answer, done[order["case"]] = _turn(cases[order["case"]], done[order["case"]], servers, order)
        _say(answer)


def _turn(case: Case, number: int, servers: Sequence[int], order: Mapping[str, float]) -> tuple[dict[str, object], int]:
    """The answer to an order, and the number of the next operation."""
    ops = int(order.get("ops", 0))
    case.prepare(range(number, number + 1 + ops))
    case.run(number)
    if not ops:
        time.sleep(max(0.0, order["start"] - time.monotonic()))
    client, server = own_cpu_s(), cpu_s_of(servers)
    seconds: list[float] = []
    while len(seconds) < ops if ops else time.monotonic() < order["stop"]:
        number += 1
        begun = time.perf_counter()
        case.run(number)
        seconds.append(time.perf_counter() - begun)
    used = {"client_cpu_s": own_cpu_s() - client, "server_cpu_s": cpu_s_of(servers) - server}
    case.finish()
    return {"seconds": seconds, **used}, number + 1


def _say(value: object) -> None:
    sys.__stdout__.write(json.dumps(value) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


class Memory:
    """`nbytes` of private memory, on huge pages where the kernel gives them on advice, every page touched."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self._array = (ctypes.c_char * nbytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._array)
        self.view = memoryview(self._array).cast("B")
        ctypes.memset(self.address, 0x5A, nbytes)


def addresses(base: int, size: int, count: int) -> list[int]:
    """Where `count` buffers of `size` bytes start, one after the other from `base`."""
    return [base + index * size for index in range(count)]


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(argv: Sequence[str], port: int, env: Mapping[str, str] | None = None) -> Iterator[int]:
    """A child that listens at `port` of loopback; its process id. Killed on leaving."""
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=env) as child:
        try:
            _wait_listening(port, child)
            yield child.pid
        finally:
            child.kill()


def _wait_listening(port: int, child: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end and child.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"nobody listens at port {port}")


def program(*names: str) -> str:
    """The path of the first of these programs that is installed, in this virtual environment or on the PATH."""
    for name in names:
        beside = Path(sys.executable).parent / name
        found = str(beside) if beside.exists() else shutil.which(name)
        if found is not None:
            return found
    raise FileNotFoundError(f"none of {', '.join(names)} is installed")


def check(good: bool, what: object) -> None:
    """End the process when a peer did not do what it was asked for."""
    if not good:
        raise RuntimeError(f"the peer did not do its work: {what}")
