"""Throughput of the SSD tier beside fio's: same file system, block size, depth and O_DIRECT, taking turns in one run.

`python -m bench.ssd [--directory DIR] [--rounds 5] [--seconds 0.7] [--size 512MiB] [--json]`. Five cases: put and get of 1 MiB and of 360
KiB records at depth 8, random get of 64 KiB records at depth 16. The tier hashes every record it writes and reads and copies it from or
to memory that is aligned to 64 bytes, like frames of an arena; fio does neither. Depth: the tier has so many lanes, that is at most so many
transfers of at most 1 MiB under way; fio so many requests of a block (io_uring, else libaio).

Sync: a put of 64 MiB is written in groups of 16 MiB with one sync each; fio is told to `fdatasync` after as many blocks. Both write over
blocks that were written before: the log is full when measuring begins, so the tier also gives up old segments meanwhile.
Each case has a log of its own: one that is written was not read before. Records that were read are copied on when their segment is
given up (a quarter of a segment at most), which writes bytes that nobody asked to be written now. `carried` tells what a writer pays for
that: the ratio of 360 KiB writes to a log all of whose records have been read. It stands beside the cases, not among them.

`ratio_to_fio` is the lowest of the cases' ratios, a case's ratio the median over rounds of tier/fio within one round.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np

from bench.report import print_json, print_table, spread
from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.tier.contract import Record
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd import SsdTier
from kvpool.tier.ssd.append import GROUP_BYTES
from kvpool.units import KIB, MIB, SECOND, parse_size

PUT_BYTES: Final = 64 * MIB
"""Of one put, about."""
SEGMENT: Final = 64 * MIB


class Case(NamedTuple):
    """Records of `length` bytes at `depth`."""

    name: str
    length: int
    depth: int
    write: bool
    random: bool


CASES: Final = (
    Case("write-1M", MIB, 8, True, False),
    Case("read-1M", MIB, 8, False, False),
    Case("write-360k", 360 * KIB, 8, True, False),
    Case("read-360k", 360 * KIB, 8, False, False),
    Case("randread-64k", 64 * KIB, 16, False, True),
)

CARRIED: Final = Case("write-360k-read", 360 * KIB, 8, True, False)
"""Writes while a quarter of what leaves is copied on."""


class Log:
    """A full log of records of one length, and what to do with it."""

    def __init__(self, directory: Path, length: int, depth: int, size: int) -> None:
        self.tier = SsdTier.open(directory, capacity_bytes=size, segment_bytes=SEGMENT, incarnation=1, lanes=depth, max_objects=1 << 20)
        self.length, self.depth, self.number, self.rng = length, depth, 0, Random(1)
        self.batch = PUT_BYTES // length
        span = length + 64  # 64-byte aligned, and not to a page
        memory = np.random.default_rng(1).integers(0, 256, self.batch * span + 64, dtype=np.uint8)
        first = 64 - memory.ctypes.data % 64
        self.sources = [memory[first + n * span : first + n * span + length] for n in range(self.batch)]
        space = np.zeros(8 * depth * span + 64, np.uint8)
        first = 64 - space.ctypes.data % 64
        self.targets = [space[first + n * span : first + n * span + length] for n in range(8 * depth)]
        while self.number * length < size:
            self.put()

    def put(self) -> int:
        """One batch; its bytes."""
        records = [self._record(self.number + n) for n in range(self.batch)]
        self.number += self.batch
        if not all(self.tier.put(records, time.monotonic_ns() + 60 * SECOND)):
            raise ConfigError(f"the SSD tier refused a batch: {self.tier.books()}")
        return self.batch * self.length

    def get(self, keys: list[BlockKey]) -> int:
        """Read these at once, as many as there are targets; their bytes."""
        if not all(self.tier.get(list(zip(keys, self.targets, strict=True)), time.monotonic_ns() + 60 * SECOND)):
            raise ConfigError(f"the SSD tier missed a record: {self.tier.books()}")
        return len(keys) * self.length

    def read_all(self) -> None:
        """Every record once."""
        keys, count = [entry.key for entry in self.tier.entries()], len(self.targets)
        for at in range(0, len(keys) - count + 1, count):
            self.get(keys[at : at + count])

    def measure(self, case: Case, seconds: float) -> float:
        """Bytes per second."""
        keys = [] if case.write else [entry.key for entry in self.tier.entries()]
        if case.random:
            self.rng.shuffle(keys)
        count = len(self.targets)
        moved, turn, start = 0, 0, time.perf_counter()
        while (took := time.perf_counter() - start) < seconds:
            if case.write:
                moved += self.put()
            else:
                at = turn * count % (len(keys) - count + 1)
                moved += self.get(keys[at : at + count])
            turn += 1
        return moved / took

    def _record(self, number: int) -> Record:
        data: Bytes = self.sources[number % len(self.sources)]
        return Record(BlockKey(sha256(b"%d" % number).digest()), None, 0, data)


class Fio:
    """fio on one file of its own."""

    def __init__(self, directory: Path, size: int, *, direct: bool) -> None:
        if shutil.which("fio") is None:
            raise ConfigError("fio is not installed, and there is nothing to compare with: apt-get install fio")
        self.path, self.size, self.direct = directory / "fio", size, direct
        self.engine = "io_uring"
        self._run("--rw=write", "--bs=1M", "--iodepth=8")  # lay the file out: its blocks are written once
        try:
            self._run("--rw=read", "--bs=1M", "--iodepth=8", "--runtime=0.1", "--time_based")
        except ConfigError:
            self.engine = "libaio"

    def measure(self, case: Case, seconds: float) -> float:
        """Bytes per second."""
        kind = "write" if case.write else "randread" if case.random else "read"
        options = [f"--rw={kind}", f"--bs={case.length}", f"--iodepth={case.depth}", "--time_based", f"--runtime={int(seconds * 1000)}ms"]
        if case.write:
            options.append(f"--fdatasync={-(-GROUP_BYTES // case.length)}")
        job = self._run(*options)
        side = job["write" if case.write else "read"]
        return float(side["io_bytes"]) / (float(side["runtime"]) / 1000)

    def _run(self, *options: str) -> dict[str, Any]:
        engine = self.engine if self.path.exists() else "psync"
        common = [f"--filename={self.path}", f"--size={self.size}", f"--ioengine={engine}", f"--direct={int(self.direct)}", "--thread"]
        done = subprocess.run(
            ["fio", "--name=bench", *common, "--randrepeat=0", "--output-format=json", *options],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise ConfigError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return job


def run(directory: Path, *, rounds: int, seconds: float, size: int) -> dict[str, Any]:
    """All cases in turn, `rounds` times."""
    with ExitStack() as stack:
        logs: dict[str, Log] = {}
        for case in (*CASES, CARRIED):
            log = logs[case.name] = Log(directory / case.name, case.length, case.depth, size)
            stack.enter_context(closing(log.tier))
        direct = all(log.tier.direct for log in logs.values())
        fio = Fio(directory, size, direct=direct)
        speeds: dict[str, list[tuple[float, float]]] = {case.name: [] for case in (*CASES, CARRIED)}
        for turn in range(rounds):
            for case in (*CASES, CARRIED):
                if case is CARRIED:
                    logs[case.name].read_all()
                sides: list[Callable[[Case, float], float]] = [logs[case.name].measure, fio.measure]
                first = turn % 2  # each goes first every other time
                got = {first: sides[first](case, seconds)}
                got[1 - first] = sides[1 - first](case, seconds)
                speeds[case.name].append((got[0], got[1]))
    cases = {
        name: {
            "ratio": spread([ours / theirs for ours, theirs in pairs]),
            "tier_gb_per_s": spread([ours / 1e9 for ours, _ in pairs]),
            "fio_gb_per_s": spread([theirs / 1e9 for _, theirs in pairs]),
        }
        for name, pairs in speeds.items()
    }
    carried = cases.pop(CARRIED.name)
    lowest = min(case["ratio"].median for case in cases.values())
    return {"ratio_to_fio": lowest, "cases": cases, "carried": carried, "direct": direct, "fio_engine": fio.engine, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", help="on the device to measure; a temporary directory in it is used and removed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.7, help="of each case in each round, on each side")
    parser.add_argument("--size", default="512MiB", help="of each log and of fio's file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=options.directory or Path.cwd(), prefix=".bench-ssd-") as directory:
        result = run(Path(directory), rounds=options.rounds, seconds=options.seconds, size=parse_size(options.size))
    result["seconds"] = time.perf_counter() - start
    print_table(
        ["case", "tier / fio", "tier GB/s", "fio GB/s"],
        [
            (name, case["ratio"], case["tier_gb_per_s"], case["fio_gb_per_s"])
            for name, case in {**result["cases"], "(carried)": result["carried"]}.items()
        ],
    )
    if options.json:
        print_json(result)


if __name__ == "__main__":
    main()
