"""Cost of one pool node's decisions: microseconds per key of `PoolState` and placement. How full the arena gets: `bench.allocator`.

`python -m bench.core [--json] [--batch 512] [--rounds 9]`. Keys are fresh bytes objects in every call, as they come off the wire,
so each pays for its first hash. Every round runs every case once, several calls a case; what counts is CPU time of this process,
since the core does nothing but compute.
"""

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from hashlib import sha256

from bench.report import print_json, print_table, spread
from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru
from kvpool.policy.placement import PlacedNode, place
from kvpool.pool import PoolLimits, PoolState, Reserve
from kvpool.units import KIB, SECOND

FRAME_BYTES = 360 * KIB + 256
CALLS = 8  # calls of one case in one round


def chain(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(sha256(f"{name}/{i}".encode()).digest()) for i in range(count)]


def items_of(keys: list[BlockKey]) -> list[Reserve]:
    return [Reserve(key, keys[i - 1] if i else None, 16 * i, FRAME_BYTES) for i, key in enumerate(keys)]


def fresh(keys: list[BlockKey]) -> list[BlockKey]:
    """Equal keys whose hashes aren't cached."""
    return [BlockKey(bytes(bytearray(key))) for key in keys]


def put(pool: PoolState, items: list[Reserve]) -> None:
    got = pool.reserve(items, owner="bench", lease_ns=60 * SECOND, now_ns=0)
    pool.commit(got.lease_id, [item.key for item in items], 0)


def cases_of(batch: int, rounds: int) -> dict[str, Callable[[], object]]:
    """One closure per case; each call of it takes one batch made beforehand."""
    turns = range((rounds + 1) * CALLS)
    roomy = PoolState(FRAME_BYTES * batch * (len(turns) + 1) * 2, PrefixLru())
    full = PoolState(FRAME_BYTES * batch * 4, PrefixLru())
    resident = chain("resident", batch)
    put(roomy, items_of(resident))
    for index in range(5):
        put(full, items_of(chain(f"old{index}", batch)))
    roomy_items = iter([items_of(chain(f"roomy{turn}", batch)) for turn in turns])
    full_items = iter([items_of(chain(f"full{turn}", batch)) for turn in turns])
    to_acquire: Iterator[list[BlockKey]] = iter([fresh(resident) for _ in turns])
    to_lookup: Iterator[list[BlockKey]] = iter([fresh(resident) for _ in turns])

    def acquire_release() -> None:
        got = roomy.acquire(next(to_acquire), owner="bench", lease_ns=SECOND, now_ns=1)
        roomy.release(got.lease_id, 2)

    cases: dict[str, Callable[[], object]] = {
        "reserve_commit": lambda: put(roomy, next(roomy_items)),
        "reserve_commit_evicting": lambda: put(full, next(full_items)),
        "acquire_release": acquire_release,
        "lookup": lambda: roomy.lookup(next(to_lookup), 2),
    }
    return cases


def cpu_in_turns(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of one call of each case, per round; one round before them warms up, uncounted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(rounds + 1):
        for name, run in cases.items():
            start = time.process_time_ns()
            for _ in range(CALLS):
                run()
            if round_:
                seconds[name].append((time.process_time_ns() - start) / CALLS / 1e9)
    return seconds


def metadata_bytes(objects: int) -> float:
    """Python memory per resident block, when `objects` blocks of 64 to 256 bytes are resident; their keys included."""
    gc.collect()
    tracemalloc.start()
    pool = PoolState(objects * 256, PrefixLru(), PoolLimits(max_blocks=objects, max_story_keys=1))
    before = tracemalloc.get_traced_memory()[0]
    for start in range(0, objects, 1000):
        keys = [BlockKey(i.to_bytes(32, "little")) for i in range(start, min(start + 1000, objects))]
        got = pool.reserve([Reserve(key, None, 0, 64 + key[0] % 193) for key in keys], owner="bench", lease_ns=SECOND, now_ns=0)
        pool.commit(got.lease_id, keys, 0)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / pool.books().blocks


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.core", description="Microseconds per key of the pool core.")
    parser.add_argument("--batch", type=int, default=512, help="keys a call")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--objects", type=int, default=0, help="also put this many tiny blocks and print what each costs in memory")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.batch < 1 or args.rounds < 1:
        parser.error("--batch and --rounds must be positive")

    nodes = [PlacedNode(f"{i:032x}", 1.0 + i % 3, zone=f"z{i % 3}") for i in range(16)]
    long_prompt = chain("prompt", 8192)
    cases = cases_of(args.batch, args.rounds)
    cases["place_8192_on_16"] = lambda: place(long_prompt, 32, nodes, 2)
    seconds = cpu_in_turns(cases, args.rounds)
    us = {
        name: spread([value / (8192 if name.startswith("place") else args.batch) * 1e6 for value in values])
        for name, values in seconds.items()
    }
    print_table(["case", "µs per key"], [[name, value] for name, value in us.items()])
    metadata = metadata_bytes(args.objects) if args.objects else None
    if metadata is not None:
        print(f"\n{args.objects:,} tiny blocks: {metadata:.0f} bytes of metadata each")
    if args.json:
        print_json({"us_per_key": us, "batch": args.batch, "metadata_bytes_per_object": metadata, "objects": args.objects})


if __name__ == "__main__":
    main()
