"""Does the shared tier's protocol hold where caches are not kept alike? One seed, one trial; `python -m kvpool.testing.sharing`.

A trial is an owner that puts, removes, makes room, crashes in the middle of anything and starts again, and two readers that find and get,
each behind a cache of its own (`NonCoherentShim`), interleaved line by line. What must hold:

    wrong    a get that hits gives the record's bytes
    damaged  no reader meets a ready, unchanged slot whose payload does not fit it
    missed   a record put before a look-up began, and not touched until it ended, is found and read
    ghost    a record removed before a look-up began, and not put again until it ended, is not

`defect` breaks one step on purpose. A trial that can't tell the broken protocol from the sound one would be worth nothing.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

import numpy as np

from kvpool.errors import FrameError, UnavailableError
from kvpool.policy.eviction import make_policy
from kvpool.pool.allocator import Allocator
from kvpool.testing.noncoherent import NonCoherentShim, memory_of
from kvpool.testing.tier_kit import data_of, key_of, record_of, soon
from kvpool.testing.turns import Turns
from kvpool.tier.memory import MemoryTier
from kvpool.tier.region import Window
from kvpool.tier.shared.layout import LINE, RegionState, SlotState, encode_slot, slot_at
from kvpool.tier.shared.reader import Seen, SharedTierReader
from kvpool.tier.shared.table import SlotTable, table_bytes

DEFECTS: Final = (
    "payload not flushed",
    "slot not flushed when ready",
    "slot ready before the payload",
    "slot not flushed when free",
    "start not announced",
    "payload not invalidated",
    "slots not invalidated",
    "no second look",
)
"""What a trial can break; "" breaks nothing."""

_CAPACITY: Final = 2048
_OBJECTS: Final = (4, 6, 9, 20)
_KEYS: Final = 10
_OWNER_STEPS: Final = 60
_PAUSES: Final = (10, 100, 400)
_NODE: Final = bytes(range(16))


class Crash(BaseException):
    """The owner's host dies here."""


class _Table(SlotTable):
    """A table with at most one defect."""

    defect = ""
    payload: "Window"

    def _announce(self, state: RegionState) -> None:
        if self.defect != "start not announced" or state is not RegionState.STARTING:
            super()._announce(state)

    def publish(self, slot: int) -> None:
        busy = self._busy[slot]
        if self.defect == "slot not flushed when ready":
            ready = encode_slot(busy._replace(state=SlotState.READY))[:LINE]
            self._region.write(slot_at(slot), np.frombuffer(ready, np.uint8))
            del self._busy[slot]
            return
        super().publish(slot)
        if self.defect == "slot ready before the payload":
            self.payload.flush(busy.offset, busy.entry.length)

    def withdraw(self, slot: int) -> None:
        if self.defect != "slot not flushed when free":
            super().withdraw(slot)
            return
        self._busy.pop(slot, None)
        self._next_generation(slot)
        self._region.write(slot_at(slot), np.zeros(LINE, np.uint8))
        self._taken[slot] = 0


class _Payload(Window):
    """The records' bytes; flushed at a put unless that is the defect."""

    defect = ""

    def flush(self, offset: int, length: int) -> None:
        if self.defect not in ("payload not flushed", "slot ready before the payload"):
            super().flush(offset, length)


class _View(NonCoherentShim):
    """A reader's view; it forgets what it should forget, or not."""

    defect = ""
    data_offset = 0

    def invalidate(self, offset: int, length: int) -> None:
        is_payload = offset >= self.data_offset
        if self.defect != ("payload not invalidated" if is_payload else "slots not invalidated"):
            super().invalidate(offset, length)


class _Reader(SharedTierReader):
    """A reader that may take the first look for the last."""

    defect = ""

    def _unchanged(self, seen: Seen) -> bool:
        return self.defect == "no second look" or super()._unchanged(seen)


class Trial:
    """One seed's run; `violations` counts by name."""

    def __init__(self, seed: int, defect: str = "") -> None:
        self.violations: Counter[str] = Counter()
        self.hits = self.crashes = 0
        self._chance = random.Random(seed)
        self._defect = defect
        self._turns = Turns(self._chance)
        self._memory = memory_of(table_bytes(max(_OBJECTS)) + _CAPACITY)
        self._lengths = [self._chance.randint(1, 700) for _ in range(_KEYS)]
        self._changes = [0] * _KEYS
        self._state = ["gone"] * _KEYS
        self._incarnation = 0
        self._fuse = -1
        self._owner_done = False

    def run(self) -> "Trial":
        """To the end."""
        self._open()
        self._turns.run([self._own, self._read, self._read])
        return self

    def _step(self) -> None:
        if self._chance.random() < 0.3:
            self._turns.turn()

    def _owner_step(self) -> None:
        for _ in range(self._chance.choice(_PAUSES) if self._chance.random() < 0.05 else 1):
            self._step()
        self._fuse -= 1
        if self._fuse == 0:
            raise Crash

    def _open(self) -> None:
        self._incarnation += 1
        self._view = NonCoherentShim(self._memory, self._chance, step=self._owner_step)
        table_class = type("_T", (_Table,), {"defect": self._defect})
        most = self._chance.choice(_OBJECTS)
        table: _Table = table_class(
            self._view, capacity=_CAPACITY, max_objects=most, node_id=_NODE, incarnation=self._incarnation, now_ns=0
        )
        payload = _Payload(self._view, table.shape.data_offset, _CAPACITY)
        payload.defect, table.payload = self._defect, Window(self._view, table.shape.data_offset, _CAPACITY)
        self._tier = MemoryTier(payload, Allocator(_CAPACITY), make_policy("lru"), name="shared", max_objects=most, catalog=table)

    def _own(self) -> None:
        for _ in range(_OWNER_STEPS):
            try:
                self._fuse = self._chance.randint(1, 200) if self._chance.random() < 0.2 else -1
                self._act(self._chance.randrange(_KEYS))
            except Crash:
                self._restart()
        self._owner_done = True

    def _act(self, number: int) -> None:
        """One put, or one remove."""
        if self._chance.random() < 0.3:
            self._remove([number])
            return
        record = record_of(number, self._lengths[number])
        while self._state[number] != "there":
            if self._change([number], lambda: self._tier.put([record], soon()) == [True], "there"):
                return
            coldest = self._tier.coldest(1)
            self._remove([n for n in range(_KEYS) if key_of(n) in coldest])

    def _remove(self, numbers: list[int]) -> None:
        self._change(numbers, lambda: self._tier.remove([key_of(n) for n in numbers]), "gone")

    def _restart(self) -> None:
        self.crashes += 1
        self._view.crash()
        self._state = ["moving"] * _KEYS
        self._fuse = self._chance.randint(1, 100) if self._chance.random() < 0.5 else -1
        try:
            self._change(list(range(_KEYS)), self._open, "gone")
        except Crash:
            self._restart()

    def _change(self, numbers: list[int], act: Callable[[], object], then: str) -> bool:
        """Do something to these, and know what holds before, while and after it; whether it succeeded."""
        before = [self._state[n] for n in numbers]
        for number in numbers:
            self._state[number] = "moving"
            self._changes[number] += 1
        done = act() is not False
        for number, old in zip(numbers, before, strict=True):
            self._state[number] = then if done else old
            self._changes[number] += 1
        return done

    def _read(self) -> None:
        view = _View(self._memory, self._chance, step=self._step)
        view.defect = self._defect
        reader: _Reader | None = None
        while not self._owner_done:
            try:
                if reader is None or not reader.live:
                    reader = _Reader(view)
                    reader.defect, view.data_offset = self._defect, reader.shape.data_offset
            except (UnavailableError, FrameError):
                reader = None
                self._turns.turn()
                continue
            damaged = reader.counters["damaged"]
            self._look(reader, self._choose())
            self.violations["damaged"] += reader.counters["damaged"] - damaged

    def _choose(self) -> int:
        """Any key, or rather one that is changing."""
        changing = [n for n, state in enumerate(self._state) if state == "moving"]
        return self._chance.choice(changing) if changing and self._chance.random() < 0.5 else self._chance.randrange(_KEYS)

    def _look(self, reader: _Reader, number: int) -> None:
        state, changes = self._state[number], self._changes[number]
        into = np.full(self._lengths[number], 0xA5, np.uint8)
        is_hit = reader.get([(key_of(number), into)], soon()) == [True]
        is_found = reader.find([key_of(number)]) != [None]
        self.hits += is_hit
        self.violations["wrong"] += is_hit and not np.array_equal(into, data_of(number, into.size))
        if changes == self._changes[number]:
            self.violations["missed"] += state == "there" and not (is_hit and is_found)
            self.violations["ghost"] += state == "gone" and (is_hit or is_found)


def seeds_to_catch(defect: str, limit: int) -> int | None:
    """How many seeds, from 0 on, until a trial shows the defect; None: not within `limit`."""
    return next((seed + 1 for seed in range(limit) if Trial(seed, defect).run().violations.total()), None)


def main() -> None:
    """Sound trials over many seeds, then how soon each defect is caught."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.testing.sharing")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    started, total, hits, crashes = time.monotonic(), Counter[str](), 0, 0
    for seed in range(args.first, args.first + args.seeds):
        trial = Trial(seed).run()
        total.update(trial.violations)
        hits, crashes = hits + trial.hits, crashes + trial.crashes
    seconds = time.monotonic() - started
    print(f"{args.seeds} seeds: {total.total()} violations {dict(+total)}, {hits} hits, {crashes} crashes, {seconds:.1f} s")
    for defect in DEFECTS:
        print(f"{defect}: caught by seed number {seeds_to_catch(defect, args.seeds)}")
    raise SystemExit(1 if total.total() else 0)


if __name__ == "__main__":
    main()
