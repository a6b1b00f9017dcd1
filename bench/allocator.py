"""How full the allocator gets, what that costs, and how much it moves.

`python -m bench.allocator [--json] [--steps 6000] [--arena 1GiB]`. Blocks fill an arena to the first refusal; then each new one
replaces the oldest, or random ones, until it fits. Four mixes of sizes: log-uniform and uniform from 16 KiB to 8 MiB, two humps (nine
tenths of 16 to 32 KiB, one tenth of 6 to 8 MiB), and the frames of 16 tokens of six real models. A `pinned` case keeps a tenth of the live
bytes unmovable and irreplaceable at any time, as readers do. Each case runs with relocation as in the pool (`Allocator.move_budget`)
and without. `mean` and `lowest` are shares of bytes in use after each step from the first refusal on; `utilisation` is the
lowest of the means with relocation, over all mixes and orders. `ns_per_alloc`: CPU per block placed and freed, refused tries
included, plans not; the steps of the cases without moves are replayed for it without a clock in between. Plans have their own column.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product

from bench.report import print_json, print_table
from kvpool.pool.allocator import Allocator, aligned
from kvpool.units import GIB, KIB, MIB, parse_size

REPLAYS = 3
MODEL_FRAMES = [192 * KIB, 360 * KIB, 896 * KIB, 1098 * KIB, 2 * MIB, 5 * MIB]
"""16 tokens of Qwen2.5-0.5B, SmolLM2-135M, Qwen2.5-7B, DeepSeek-V3, Llama-3.1-8B and -70B in bfloat16."""
HEADER_BYTES = 256

MIXES: dict[str, Callable[[random.Random], int]] = {
    "log-uniform": lambda choice: int(2 ** choice.uniform(14, 23)),
    "uniform": lambda choice: choice.randint(16 * KIB, 8 * MIB),
    "two humps": lambda choice: choice.randint(16 * KIB, 32 * KIB) if choice.random() < 0.9 else choice.randint(6 * MIB, 8 * MIB),
    "models": lambda choice: choice.choice(MODEL_FRAMES) + HEADER_BYTES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """What one case came to. Shares of the arena; `moved_per_allocated` in bytes per byte; times in ns of CPU."""

    first_refusal: float
    mean: float
    lowest: float
    moved_per_allocated: float
    plans: int
    ns_per_plan: float
    ns_per_plan_99th: float
    ns_per_alloc: float | None


class Arena:
    """An allocator with live blocks that come and go."""

    def __init__(self, nbytes: int, *, order: str, pinned: bool, relocate: bool) -> None:
        self.allocator = Allocator(nbytes)
        self.choice = random.Random(7)
        self.order, self.relocate = order, relocate
        self.pinned_share = 0.1 if pinned else 0.0
        self.live: dict[int, None] = {}  # block ids, oldest first
        self.ids: list[int] = []  # the same for a random choice
        self.offset: dict[int, int] = {}
        self.id_at: dict[int, int] = {}
        self.pins: dict[int, int] = {}  # block id: bytes
        self.pinned_bytes = 0
        self.allocated = self.moved = 0
        self.plan_ns: list[int] = []
        self.first_refusal = 0.0
        self.steps: list[tuple[bool, int]] = []  # (allocate, length) or (not, offset freed)

    @property
    def used(self) -> float:
        """Share of the arena in use."""
        return 1 - self.allocator.free_bytes / self.allocator.capacity_bytes

    def insert(self, block: int, length: int) -> None:
        """Make room by the order of the case, and place the block."""
        while (offset := self._fit(length)) is None:
            self._drop_one()
        self.live[block] = None
        self.ids.append(block)
        self.offset[block], self.id_at[offset] = offset, block
        self.allocated += aligned(length)
        if self.pinned_share:
            self._pin(block, length)

    def _fit(self, length: int) -> int | None:
        self.steps.append((True, length))
        offset = self.allocator.allocate(length)
        if offset is None and not self.first_refusal:
            self.first_refusal = self.used
        if offset is not None or not self.relocate or self.allocator.free_bytes < aligned(length):
            return offset
        budget_bytes = self.allocator.move_budget(length, others_may_leave=True)
        start = time.thread_time_ns()
        moves = self.allocator.plan_moves(length, lambda at: self.id_at[at] not in self.pins, budget_bytes)
        self.plan_ns.append(time.thread_time_ns() - start)
        if moves is None:
            return None
        self.allocator.apply(moves)
        for source, target, size in moves:
            block = self.id_at.pop(source)
            self.offset[block], self.id_at[target] = target, block
            self.moved += size
        return self.allocator.allocate(length)

    def _drop_one(self) -> None:
        block = self._random() if self.order == "random" else next(block for block in self.live if block not in self.pins)
        del self.live[block]
        offset = self.offset.pop(block)
        del self.id_at[offset]
        self.steps.append((False, offset))
        self.allocator.free(offset)

    def _random(self) -> int:
        while True:
            at = self.choice.randrange(len(self.ids))
            block = self.ids[at]
            if block not in self.pins:
                self.ids[at] = self.ids[-1]
                self.ids.pop()
                return block

    def _pin(self, block: int, length: int) -> None:
        """Readers come to a tenth of the blocks, and leave those they came to first."""
        if self.choice.random() < self.pinned_share:
            self.pins[block] = length
            self.pinned_bytes += length
        while self.pinned_bytes > self.pinned_share * self.allocator.capacity_bytes:
            self.pinned_bytes -= self.pins.pop(next(iter(self.pins)))


def fill(nbytes: int, steps: int, mix: str, *, order: str, pinned: bool, relocate: bool) -> Fill:
    arena = Arena(nbytes, order=order, pinned=pinned, relocate=relocate)
    used: list[float] = []
    block = 0
    while len(used) < steps:
        arena.insert(block, MIXES[mix](arena.choice))
        if arena.first_refusal:
            used.append(arena.used)
        block += 1
    arena.allocator.check()
    plan_ns = sorted(arena.plan_ns) or [0]
    return Fill(
        first_refusal=arena.first_refusal,
        mean=sum(used) / len(used),
        lowest=min(used),
        moved_per_allocated=arena.moved / arena.allocated,
        plans=len(arena.plan_ns),
        ns_per_plan=sum(plan_ns) / len(plan_ns),
        ns_per_plan_99th=plan_ns[len(plan_ns) * 99 // 100],
        ns_per_alloc=None if relocate else replay(nbytes, arena.steps) / block,
    )


def replay(nbytes: int, steps: list[tuple[bool, int]]) -> int:
    """CPU ns of the same calls again, the quickest of some rounds."""
    rounds: list[int] = []
    for _ in range(REPLAYS):
        allocator = Allocator(nbytes)
        start = time.thread_time_ns()
        for allocate, number in steps:
            if allocate:
                allocator.allocate(number)
            else:
                allocator.free(number)
        rounds.append(time.thread_time_ns() - start)
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.allocator", description="Utilisation and cost of the allocator.")
    parser.add_argument("--arena", type=parse_size, default=GIB, help="bytes, such as 1GiB")
    parser.add_argument("--steps", type=int, default=6000, help="blocks replaced in each case")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.arena < 64 * MIB or args.steps < 1:
        parser.error("--arena must be 64MiB or more, --steps positive")
    cases: dict[str, Fill] = {}
    for mix, order, pinned, relocate in product(MIXES, ("oldest", "random"), (False, True), (True, False)):
        name = f"{mix}, {order}{', pinned' if pinned else ''}{'' if relocate else ', no moves'}"
        cases[name] = fill(args.arena, args.steps, mix, order=order, pinned=pinned, relocate=relocate)
    rows = [
        [name, *(f"{100 * share:.1f} %" for share in (f.first_refusal, f.mean, f.lowest)), f"{f.moved_per_allocated:.3f}", f.plans,
         f"{f.ns_per_plan / 1000:.0f}", f"{f.ns_per_plan_99th / 1000:.0f}", "" if f.ns_per_alloc is None else f"{f.ns_per_alloc:.0f}"]
        for name, f in cases.items()
    ]  # fmt: skip
    headers = ["replaced", "first refusal", "mean", "lowest", "moved/allocated", "plans", "µs/plan", "99 % of plans", "ns/alloc+free"]
    print_table(headers, rows)
    if args.json:
        moving = [f for name, f in cases.items() if not name.endswith("no moves")]
        print_json(
            {
                "utilisation": min(f.mean for f in moving),
                "lowest": min(f.lowest for f in moving),
                "utilisation_without_moves": min(f.mean for name, f in cases.items() if name.endswith("no moves")),
                "ns_per_alloc": max(f.ns_per_alloc for f in cases.values() if f.ns_per_alloc is not None),
                "moved_per_allocated": max(f.moved_per_allocated for f in moving),
                "arena_bytes": args.arena,
                "cases": {name: asdict(f) for name, f in cases.items()},
            }
        )


if __name__ == "__main__":
    main()
