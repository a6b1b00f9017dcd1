"""Kill the writer of an SSD log again and again, and count what is there afterwards.

`python -m kvpool.testing.kill_ssd [--kills 200] [--directory DIR] [--records 10000] [--length 65536] [--json]`. A child process opens the
log, writes batches of records of odd lengths, removes a few, and says on a pipe what was acknowledged; it is killed with SIGKILL at a
random moment. Then the log is opened here: of what was acknowledged, everything that the log's size allows must be listed, what the last
lives wrote must be read back right, and nothing that was removed may be there. At the end everything is read once, and a log of
`--records` records of `--length` bytes is killed while it is written to and timed while it recovers. Exit status 1 if anything was lost,
wrong or brought back.

A record's bytes follow from its number, so whatever comes out can be judged without having kept it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from kvpool.block import BlockKey
from kvpool.errors import ConfigError
from kvpool.tier.contract import Record
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd import PAGE, SsdTier
from kvpool.units import GIB, KIB, MIB, SECOND

SEGMENT: Final = 2 * MIB
CAPACITY: Final = 1 * GIB
_PER_LIFE: Final = 150
_MAX_LENGTH: Final = 64 * KIB
_PATIENCE_S: Final = 60.0
_pattern: Final = np.frombuffer(Random(1).randbytes(MIB + 4096), np.uint8)


def key_of(number: int) -> BlockKey:
    """A key, another one for each number."""
    return BlockKey(sha256(b"kill %d" % number).digest())


def length_of(number: int, fixed: int = 0) -> int:
    """Bytes of record `number`: 1 to 64 KiB, or `fixed`."""
    return fixed or 1 + int.from_bytes(key_of(number)[:4], "little") % _MAX_LENGTH


def data_of(number: int, fixed: int = 0) -> Bytes:
    """Its bytes, which begin with its key."""
    length = length_of(number, fixed)
    start = number * 64 % 4096
    data = _pattern[start : start + length].copy()
    data[: min(32, length)] = memoryview(key_of(number)[:length])
    return data


def record_of(number: int, fixed: int = 0) -> Record:
    """The record."""
    return Record(key_of(number), key_of(number - 1) if number else None, 16 * number, data_of(number, fixed), 0, 0, "kill")


def write(directory: str, start: int, count: int, capacity: int, fixed: int) -> None:
    """The child: records from `start` on; says `+ number` for each acknowledged one, `- number` when one is being removed."""
    rng = Random(start)
    tier = SsdTier.open(directory, capacity_bytes=capacity, segment_bytes=SEGMENT, incarnation=time.time_ns() // 1000, lanes=4)
    os.write(1, b"open\n")
    number = start
    while number < start + count:
        batch = range(number, min(start + count, number + (8 if fixed else rng.randint(1, 12))))
        stored = tier.put([record_of(n, fixed) for n in batch], time.monotonic_ns() + 60 * SECOND)
        os.write(1, b"".join(b"+ %d\n" % n for n, ok in zip(batch, stored, strict=True) if ok))
        number = batch.stop
        if not fixed and rng.random() < 0.2:
            gone = rng.choice(batch)
            os.write(1, b"- %d\n" % gone)
            tier.remove([key_of(gone)])
            os.write(1, b"-- %d\n" % gone)
    os.write(1, b"end\n")
    time.sleep(_PATIENCE_S)  # to be killed


class Killing:
    """A log and what its killed writers said. `kept`: acknowledged numbers, oldest first; `gone`: removed for sure."""

    def __init__(self, directory: str, capacity: int, seed: int) -> None:
        self.directory, self.capacity, self.rng = directory, capacity, Random(seed)
        self.kept: OrderedDict[int, None] = OrderedDict()
        self.gone: set[int] = set()
        self.next = 0
        self.tally = dict.fromkeys(("kills", "acknowledged", "expected", "listed", "read", "lost", "wrong", "brought_back", "torn"), 0)
        self.slowest = 0.0

    def life(self, *, count: int = _PER_LIFE, fixed: int = 0) -> list[int]:
        """One writer from birth to death; what it acknowledged."""
        arguments = ["--write", self.directory, *map(str, (self.next, count, self.capacity, fixed))]
        child = subprocess.Popen([sys.executable, "-m", "kvpool.testing.kill_ssd", *arguments], stdout=subprocess.PIPE)
        assert child.stdout is not None
        try:
            said = [child.stdout.readline()]
            stop_after = count if fixed else self.rng.randint(0, count)
            while len(said) <= stop_after and (line := child.stdout.readline()) and line != b"end\n":
                said.append(line)
            if not fixed:
                time.sleep(self.rng.random() * 0.004)
        finally:
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read()
            child.stdout.close()
            child.wait(_PATIENCE_S)
        self.next += count
        self.tally["kills"] += 1
        return self._hear(said + rest.splitlines(keepends=True))

    def _hear(self, lines: list[bytes]) -> list[int]:
        new: list[int] = []
        for line in lines:
            what, _, number = line.strip().partition(b" ")
            if not line.endswith(b"\n") or not number:
                continue
            if what == b"+":
                new.append(int(number))
                self.kept[int(number)] = None
            elif what == b"-":
                self.kept.pop(int(number), None)
            else:
                self.gone.add(int(number))
        self.tally["acknowledged"] += len(new)
        return new

    def check(self, recent: list[int] | None, fixed: int = 0) -> SsdTier:
        """Open the log and compare; read back `recent`, or everything when it is None. The caller closes it."""
        tier = SsdTier.open(self.directory, capacity_bytes=self.capacity, segment_bytes=SEGMENT, incarnation=1, lanes=4)
        self.slowest = max(self.slowest, tier.recovery.seconds)
        self.tally["torn"] += tier.recovery.torn
        expected = self._expected(fixed)
        listed = [entry is not None for entry in tier.find([key_of(n) for n in expected])]
        self.tally["expected"] += len(expected)
        self.tally["listed"] += sum(listed)
        for number in expected if recent is None else [n for n in recent if n in self.kept]:
            buffer = np.zeros(length_of(number, fixed), np.uint8)
            found = tier.get([(key_of(number), buffer)], time.monotonic_ns() + 60 * SECOND)[0]
            self.tally["read"] += found
            self.tally["lost"] += not found
            self.tally["wrong"] += found and not np.array_equal(buffer, data_of(number, fixed))
        self.tally["brought_back"] += sum(entry is not None for entry in tier.find([key_of(n) for n in sorted(self.gone)]))
        return tier

    def _expected(self, fixed: int) -> list[int]:
        """The newest acknowledged records, as many as surely have room: each takes its data, padded, and two pages at most."""
        room, expected = self.capacity - 3 * SEGMENT, []
        for number in reversed(self.kept):
            room -= length_of(number, fixed) + 3 * PAGE
            if room < 0:
                break
            expected.append(number)
        return expected


def timed_recovery(directory: str, records: int, length: int) -> tuple[int, float]:
    """Write `records` records of `length` bytes, kill the writer, recover; the records found and the seconds of recovery."""
    per_segment = (SEGMENT - 4 * PAGE) // (length + 2 * PAGE)
    if not per_segment:
        raise ConfigError(f"records of {length} bytes don't fit into segments of {SEGMENT}; use shorter ones")
    killing = Killing(directory, (records // per_segment + 8) * SEGMENT, 1)
    killing.life(count=records, fixed=length)
    with closing(killing.check([], length)) as tier:
        return tier.recovery.records, tier.recovery.seconds


def run(directory: str, *, kills: int, records: int, length: int, capacity: int = CAPACITY, seed: int = 1) -> dict[str, Any]:
    """The whole test; the tally, and `ok`."""
    start = time.perf_counter()
    killing = Killing(str(Path(directory) / "kills"), capacity, seed)
    for _ in range(kills):
        recent = killing.life()
        killing.check(recent).close()
    killing.check(None).close()
    tally = killing.tally
    result: dict[str, Any] = {
        **tally,
        "readopted": tally["listed"] / max(1, tally["expected"]),
        "slowest_recovery_s": killing.slowest,
        "ok": not (tally["lost"] or tally["wrong"] or tally["brought_back"]) and tally["listed"] == tally["expected"] > 0,
    }
    if records:
        found, seconds = timed_recovery(str(Path(directory) / "timed"), records, length)
        result["recovery"] = {"records": found, "length": length, "seconds": seconds, "seconds_per_10000": seconds * 10_000 / max(1, found)}
        result["ok"] = result["ok"] and found >= 0.999 * records
    result["seconds"] = time.perf_counter() - start
    return result


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--directory", help="where to make the log; a temporary directory unless given")
    parser.add_argument("--records", type=int, default=10_000, help="records of the timed recovery, 0: none")
    parser.add_argument("--length", type=int, default=64 * KIB, help="bytes of each of them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write[0], *map(int, options.write[1:]))
        return 0
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="kvpool-kill-") as directory:
        result = run(directory, kills=options.kills, records=options.records, length=options.length, seed=options.seed)
    if options.json:
        print(json.dumps(result, sort_keys=True))
    else:
        for name, value in result.items():
            print(f"{name:20} {value}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
