"""How full the allocator gets, what that costs, and how much it moves.

`python -m bench.allocator [--json] [--steps 6000] [--arena 1GiB]`. Blocks of 16 KiB to 8 MiB, log-uniform, fill the arena to the first
refusal; then each new one replaces the oldest, or random ones, until it fits. A case with `pinned` keeps a tenth of the live bytes
unmovable and irreplaceable at any time, as readers do. `utilisation` of a case is the mean share of bytes in use after the first refusal,
`lowest` its lowest. Each case runs with relocation as in the node (moves of at most four times the block) and without.
"""

import argparse
import random
import time
from dataclasses import asdict, dataclass

from bench.report import print_json, print_table
from kvpool.pool.allocator import Allocator, aligned
from kvpool.units import GIB, parse_size

MOVE_FACTOR = 4  # as kvpool/pool/room.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """What one case came to. Shares of the arena; `moved_per_allocated` in bytes per byte; times in ns of CPU."""

    first_refusal: float
    mean: float
    lowest: float
    moved_per_allocated: float
    ns_per_alloc: float
    ns_per_plan: float
    plans: int


class Arena:
    """An allocator with live blocks that come and go."""

    def __init__(self, nbytes: int, *, order: str, pinned: bool, relocate: bool) -> None:
        self.allocator = Allocator(nbytes)
        self.choice = random.Random(7)
        self.order, self.relocate = order, relocate
        self.pinned_share = 0.1 if pinned else 0.0
        self.live: list[int] = []  # block ids
        self.offset: dict[int, int] = {}
        self.id_at: dict[int, int] = {}
        self.pins: dict[int, int] = {}  # block id: bytes
        self.allocated = self.moved = self.plans = self.calls = 0
        self.alloc_ns = self.plan_ns = 0
        self.first_refusal = 0.0

    @property
    def used(self) -> float:
        """Share of the arena in use."""
        return 1 - self.allocator.free_bytes / self.allocator.capacity_bytes

    def insert(self, block: int, length: int) -> None:
        """Make room by the order of the case, and place the block."""
        while (offset := self._fit(length)) is None:
            self._drop_one()
        self.live.append(block)
        self.offset[block], self.id_at[offset] = offset, block
        self.allocated += aligned(length)
        if self.pinned_share:
            self._pin(block, length)

    def _fit(self, length: int) -> int | None:
        offset = self._allocate(length)
        if offset is None and not self.first_refusal:
            self.first_refusal = self.used
        if offset is not None or not self.relocate or self.allocator.free_bytes < aligned(length):
            return offset
        start = time.process_time_ns()
        moves = self.allocator.plan_moves(length, lambda at: self.id_at[at] not in self.pins, MOVE_FACTOR * aligned(length))
        self.plan_ns += time.process_time_ns() - start
        self.plans += 1
        if moves is None:
            return None
        self.allocator.apply(moves)
        for source, target, size in moves:
            block = self.id_at.pop(source)
            self.offset[block], self.id_at[target] = target, block
            self.moved += size
        return self._allocate(length)

    def _allocate(self, length: int) -> int | None:
        start = time.process_time_ns()
        offset = self.allocator.allocate(length)
        self.alloc_ns += time.process_time_ns() - start
        self.calls += 1
        return offset

    def _drop_one(self) -> None:
        while True:
            at = 0 if self.order == "oldest" else self.choice.randrange(len(self.live))
            block = self.live[at]
            if block in self.pins:
                if self.order == "oldest":
                    self.live.append(self.live.pop(at))
                continue
            self.live.pop(at)
            offset = self.offset.pop(block)
            del self.id_at[offset]
            self.allocator.free(offset)
            return

    def _pin(self, block: int, length: int) -> None:
        """Readers come to this block, and leave the ones they came to first."""
        self.pins[block] = length
        while sum(self.pins.values()) > self.pinned_share * self.allocator.capacity_bytes:
            del self.pins[next(iter(self.pins))]


def fill(nbytes: int, steps: int, *, order: str, pinned: bool, relocate: bool) -> Fill:
    arena = Arena(nbytes, order=order, pinned=pinned, relocate=relocate)
    used: list[float] = []
    for block in range(steps):
        arena.insert(block, int(2 ** arena.choice.uniform(14, 23)))
        if arena.first_refusal:
            used.append(arena.used)
    if not used:
        raise SystemExit(f"{steps} blocks don't fill the arena; raise --steps or lower --arena")
    return Fill(
        first_refusal=arena.first_refusal,
        mean=sum(used) / len(used),
        lowest=min(used),
        moved_per_allocated=arena.moved / arena.allocated,
        ns_per_alloc=arena.alloc_ns / arena.calls,
        ns_per_plan=arena.plan_ns / max(1, arena.plans),
        plans=arena.plans,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.allocator", description="Utilisation and cost of the allocator.")
    parser.add_argument("--arena", type=parse_size, default=GIB, help="bytes, such as 1GiB")
    parser.add_argument("--steps", type=int, default=6000, help="blocks a case")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    cases: dict[str, Fill] = {}
    for order in ("oldest", "random"):
        for pinned in (False, True):
            for relocate in (True, False):
                name = f"{order}{', pinned' if pinned else ''}{'' if relocate else ', no moves'}"
                cases[name] = fill(args.arena, args.steps, order=order, pinned=pinned, relocate=relocate)
    rows = [
        [name, *(f"{100 * share:.1f} %" for share in (f.first_refusal, f.mean, f.lowest)), f"{f.moved_per_allocated:.3f}",
         f"{f.ns_per_alloc:.0f}", f"{f.ns_per_plan / 1000:.0f}", f.plans]
        for name, f in cases.items()
    ]  # fmt: skip
    print_table(["replaced", "first refusal", "mean", "lowest", "moved/allocated", "ns/alloc", "µs/plan", "plans"], rows)
    if args.json:
        real = {name: f for name, f in cases.items() if not name.endswith("no moves")}
        print_json(
            {
                "utilisation": min(f.mean for f in real.values()),
                "ns_per_alloc": max(f.ns_per_alloc for f in real.values()),
                "moved_per_allocated": max(f.moved_per_allocated for f in real.values()),
                "arena_bytes": args.arena,
                "cases": {name: asdict(f) for name, f in cases.items()},
            }
        )


if __name__ == "__main__":
    main()
