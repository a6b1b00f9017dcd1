"""The log over a disk that loses, tears, misplaces and rots: what was acknowledged survives, and only right bytes come out."""

import hashlib
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from kvpool.block import BlockKey
from kvpool.clock import ManualClock
from kvpool.testing.sim.disk import Crash, SimDisk
from kvpool.tier.contract import Record
from kvpool.tier.pages import Bytes
from kvpool.tier.ssd import SsdTier
from kvpool.units import KIB, SECOND

SEGMENT = 64 * KIB
SLOTS = 8
LENGTHS = (1, 100, 1000, 4000, 4096, 5000, 9000, 20_000)


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


def data_of(number: int) -> Bytes:
    length = LENGTHS[number % len(LENGTHS)]
    return np.frombuffer(Random(number).randbytes(length), np.uint8)


def record_of(number: int) -> Record:
    return Record(key_of(number), key_of(number - 1) if number else None, number, data_of(number), 0, number, "t" * (number % 3))


@dataclass
class World:
    """One disk through many lives. `kept`: acknowledged and not removed; `gone`: removed, durably."""

    seed: int
    slots: int = SLOTS
    kept: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)
        self.clock = ManualClock(1)
        self.disk = SimDisk(2 * self.slots * SEGMENT, Random(self.seed + 1))
        self.lives = 0

    def open(self) -> SsdTier:
        self.lives += 1
        return SsdTier(
            self.disk,
            capacity_bytes=self.slots * SEGMENT,
            segment_bytes=SEGMENT,
            incarnation=7,
            lanes=0,
            clock=self.clock,
            wall_ms=lambda: 1,
        )

    def read(self, tier: SsdTier, number: int) -> bool:
        buffer = np.zeros(data_of(number).size, np.uint8)
        found = tier.get([(key_of(number), buffer)], self.clock.now_ns() + SECOND)[0]
        assert not found or np.array_equal(buffer, data_of(number)), f"wrong bytes for {number}"
        return found

    def live(self, tier: SsdTier, steps: int, numbers: int) -> None:
        """Put, remove and read at random; ends early with `Crash`. Books hold between steps."""
        for _ in range(steps):
            chosen = [self.rng.randrange(numbers) for _ in range(self.rng.randint(1, 6))]
            if self.rng.random() < 0.7:
                for number in chosen:  # until it is answered, either may be
                    self.gone.discard(number)
                for number, ok in zip(chosen, tier.put([record_of(n) for n in chosen], self.clock.now_ns() + SECOND), strict=True):
                    if ok:
                        self.kept.add(number)
            elif self.rng.random() < 0.5:
                for number in chosen[:2]:
                    self.kept.discard(number)
                tier.remove([key_of(n) for n in chosen[:2]])
                if not tier.books().counters["pending_removals"]:
                    self.gone.update(chosen[:2])
            else:
                for number in chosen:
                    self.read(tier, number)
            self.let_go(tier)

    def let_go(self, tier: SsdTier) -> None:
        """A log that had to make room may have given up records; one that had not, may not."""
        if tier.books().counters["evicted"]:
            self.kept = {number for number in self.kept if tier.find([key_of(number)])[0] is not None}

    def end(self, *, power: bool) -> None:
        if power:
            self.disk.lose_power()
        else:
            self.disk.kill()


@pytest.mark.parametrize("seed", range(24))
def test_log_crashed_at_any_call_keeps_what_it_acknowledged(seed: int) -> None:
    """Killed or without power at a random call to the disk, ten times over: acknowledged records are there, removed ones are not."""
    world = World(seed, slots=64 if seed % 2 else SLOTS)
    for life in range(10):
        tier = world.open()
        assert tier.incarnation > tier.last_incarnation >= (7 if life else 0)
        for number in sorted(world.kept):
            assert world.read(tier, number), f"life {life} lost {number}: {tier.recovery}"
        for number in sorted(world.gone):
            assert not world.read(tier, number), f"life {life} brought back {number}"
        assert tier.recovery.damaged <= 1
        assert tier.books().counters["corrupt"] == 0
        world.disk.faults.crash_in = world.rng.randint(1, 60)
        try:
            world.live(tier, 20, 80)
        except Crash:
            world.let_go(tier)
            world.end(power=world.rng.random() < 0.7)
        world.disk.faults.crash_in = 0


@pytest.mark.parametrize("seed", range(8))
def test_log_on_a_failing_disk_keeps_what_it_acknowledged(seed: int) -> None:
    """Writes that fail or stop short and syncs that fail are refusals: nothing raised, nothing acknowledged lost, and it comes back."""
    world = World(seed)
    for _ in range(5):
        tier = world.open()
        for number in sorted(world.kept):
            assert world.read(tier, number)
        for number in sorted(world.gone):
            assert not world.read(tier, number)
        faults = world.disk.faults
        faults.write_error, faults.short_write, faults.sync_error = world.rng.choice([(0.1, 0, 0), (0, 0.1, 0), (0, 0, 0.1), (0.05,) * 3])
        world.live(tier, 40, 80)
        faults.write_error = faults.short_write = faults.sync_error = 0.0
        world.clock.advance(5 * SECOND)
        assert tier.put([record_of(1000)], world.clock.now_ns() + SECOND) == [True]
        assert tier.books().state == "ok"
        tier.remove([key_of(1000)])
        assert tier.books().counters["pending_removals"] == 0
        world.let_go(tier)
        world.end(power=True)


@pytest.mark.parametrize("seed", range(8))
def test_log_on_a_lying_disk_never_serves_wrong_bytes(seed: int) -> None:
    """Misplaced writes and rotten bits, in headers and in data, may lose records but never change one."""
    world = World(seed)
    for _ in range(6):
        tier = world.open()
        for number in range(80):
            world.read(tier, number)
        world.disk.faults.misdirected = 0.05
        world.live(tier, 20, 80)
        world.disk.faults.misdirected = 0.0
        for _ in range(5):
            world.disk.flip_bit()
        for number in range(80):
            world.read(tier, number)
        world.end(power=world.rng.random() < 0.5)


def test_log_restarted_without_faults_has_every_record_the_index_had() -> None:
    """Recovery from the log alone is the index as it was, through many rounds of reclaiming."""
    world = World(5, slots=5)
    tier = world.open()
    for _ in range(4):
        world.live(tier, 150, 200)
        before = sorted(tier.entries())
        tier.close()
        tier = world.open()
        after = {entry.key: entry for entry in tier.entries()}
        assert {entry.key for entry in before} <= after.keys()
        assert all(after[entry.key] == entry for entry in before)
        counters = tier.books().counters
        assert tier.recovery.torn == tier.recovery.corrupt == counters["corrupt"] == 0
