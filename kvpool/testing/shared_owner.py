"""Owners of a shared tier that die: the far side of crash tests.

`SharedOwner` starts `python -m kvpool.testing.shared_owner PATH`, which puts and removes records of the tier kit without end, until it is
killed or its standard input ends. With `--at-every-step` the process instead plays an owner that dies at its first access to memory, one
that dies half-way through it, one that dies at the second..., each forked from it, and reads what each left behind.
"""

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import numpy as np

from kvpool.errors import DeadlineError, FrameError, UnavailableError
from kvpool.policy.eviction import make_policy
from kvpool.pool.allocator import Allocator
from kvpool.testing.tier_kit import data_of, key_of, record_of, soon
from kvpool.tier.memory import MemoryTier
from kvpool.tier.pages import Bytes
from kvpool.tier.shared.opening import share
from kvpool.tier.shared.reader import SharedTierReader
from kvpool.tier.shared.region import SharedRegion
from kvpool.tier.shared.table import table_bytes
from kvpool.units import KIB

KEYS: Final = 12
CAPACITY: Final = 256 * KIB
_OBJECTS: Final = 64
_NODE: Final = bytes(range(16))
_START_S: Final = 60.0
_ENDLESS: Final = 1 << 60


def length_of(number: int) -> int:
    """Bytes of record `number`: from one line to many pages, more together than the tier holds."""
    return 50 + 5_003 * number


class SharedOwner:
    """The started process; its tier is live when the constructor returns."""

    def __init__(self, path: Path, incarnation: int) -> None:
        command = [sys.executable, "-m", "kvpool.testing.shared_owner", str(path), str(incarnation)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stream = self._process.stdout
        if stream is None or not select.select([stream], [], [], _START_S)[0] or not stream.readline():
            self.kill()
            raise DeadlineError(f"the owner was not ready within {_START_S:.0f} s")

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait(_START_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Mortal(SharedRegion):
    """A region whose owner is killed at the `dies_at`-th write or flush; before it, or with half a write done."""

    dies_at = _ENDLESS
    half = False

    def write(self, offset: int, data: Bytes) -> None:
        """Copy in, or die."""
        self.dies_at -= 1
        if self.dies_at == 0:
            if self.half:
                super().write(offset, data[: data.size // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(offset, data)

    def flush(self, offset: int, length: int) -> None:
        """Flush, or die."""
        self.dies_at -= 1
        if self.dies_at == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super().flush(offset, length)


def open_owned(path: Path, incarnation: int, *, dies_at: int = _ENDLESS, half: bool = False) -> MemoryTier:
    """The tier of this process; it may be one that dies."""
    region = Mortal.own(path, table_bytes(_OBJECTS) + CAPACITY)
    region.dies_at, region.half = dies_at, half
    space, policy = Allocator(CAPACITY), make_policy("lru")
    return share(region, CAPACITY, _NODE, incarnation, space=space, policy=policy, max_objects=_OBJECTS)


def read_all(reader: SharedTierReader) -> int:
    """How many records can be read; `FrameError` if one has other bytes than were put, or doesn't fit its slot."""
    hits = 0
    for number in range(KEYS):
        into = np.full(length_of(number), 0xA5, np.uint8)
        if reader.get([(key_of(number), into)], soon())[0]:
            hits += 1
            if not np.array_equal(into, data_of(number, into.size)):
                raise FrameError(f"wrong bytes for record {number}")
    if reader.counters["damaged"]:
        raise FrameError("a slot that is ready has a payload that does not fit it")
    return hits


def churn(tier: MemoryTier, chance: random.Random, steps: int) -> None:
    """Put and remove records at random; to make room the coldest go."""
    for _ in range(steps):
        number = chance.randrange(KEYS)
        if chance.random() < 0.3:
            tier.remove([key_of(number)])
        while not tier.put([record_of(number, length_of(number))], soon())[0]:
            tier.remove(tier.coldest(length_of(number)))


def die_at_every_step(path: Path, stride: int) -> dict[str, int]:
    """Owners that die at step 1, 1 + `stride`... until one gets through; how many died, and what could be read after them."""
    deaths = readable = unattached = 0
    for step in range(1, _ENDLESS, stride):
        for half in (False, True):
            child = os.fork()
            if child == 0:
                churn(open_owned(path, deaths + 1, dies_at=step, half=half), random.Random(7), 12)
                os._exit(0)
            if os.waitpid(child, 0)[1] == 0:
                return {"deaths": deaths, "readable": readable, "unattached": unattached}
            deaths += 1
            try:
                reader = SharedTierReader.open(path)
            except (UnavailableError, FrameError):
                unattached += 1  # it died before its tier was live
                continue
            with reader:
                readable += read_all(reader)
    return {}


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.testing.shared_owner")
    parser.add_argument("path", type=Path)
    parser.add_argument("incarnation", type=int, nargs="?", default=1)
    parser.add_argument("--at-every-step", action="store_true")
    parser.add_argument("--stride", type=int, default=1)
    args = parser.parse_args()
    if args.at_every_step:
        print(json.dumps(die_at_every_step(args.path, args.stride)))
        return
    tier, chance = open_owned(args.path, args.incarnation), random.Random(args.incarnation)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        churn(tier, chance, 20)
    tier.close()


if __name__ == "__main__":
    main()
