"""What an eviction policy costs: time per event, bytes per block, and whether a long life makes it grow.

`python -m bench.policies [--blocks 50000] [--churn 0] [--rounds 3] [--json]`. Twice as many blocks as fit come in chains of 24, so half of
the inserts evict first; then three in five of the resident ones are touched. CPU time of this process, per event; policies take turns.
`--churn N` lets N more pass through a store of 200 and shows the bytes before and after.
"""

import argparse
import time
from contextlib import closing
from hashlib import sha256

from bench.report import print_json, print_table, spread
from kvpool.block import BlockKey
from kvpool.policy.eviction import POLICIES, Arrival, EvictionPolicy, make_policy
from kvpool.testing.policy_kit import churn, footprint

CHAIN = 24


def fill(policy: EvictionPolicy, keys: list[BlockKey], capacity: int) -> float:
    """Microseconds per insert, evicting when full."""
    start = time.process_time_ns()
    for i, key in enumerate(keys):
        if len(policy) >= capacity:
            with closing(policy.victims()) as victims:
                policy.removed(next(victims))
        position = i % CHAIN
        policy.inserted(Arrival(key, keys[i - 1] if position else None, 16 * position, 400_000, 16 * CHAIN), i)
    return (time.process_time_ns() - start) / len(keys) / 1e3


def touch(policy: EvictionPolicy, keys: list[BlockKey], now_ns: int) -> float:
    """Microseconds per touch."""
    start = time.process_time_ns()
    for key in keys:
        policy.touched(key, now_ns, 16 * CHAIN)
    return (time.process_time_ns() - start) / len(keys) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.policies", description="Cost of each eviction policy.")
    parser.add_argument("--blocks", type=int, default=50_000, help="resident blocks")
    parser.add_argument("--churn", type=int, default=0, help="blocks of a long life")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.blocks < 10 or args.rounds < 1 or args.churn < 0:
        parser.error("--blocks must be at least 10, --rounds positive, --churn not negative")
    keys = [BlockKey(sha256(b"%d" % i).digest()) for i in range(2 * args.blocks)]
    resident = sorted(keys[args.blocks + args.blocks // 5 : 2 * args.blocks - args.blocks // 5])
    inserts: dict[str, list[float]] = {name: [] for name in POLICIES}
    touches: dict[str, list[float]] = {name: [] for name in POLICIES}
    sizes: dict[str, float] = {}
    for _ in range(args.rounds):
        for name in POLICIES:
            policy = make_policy(name)
            inserts[name].append(fill(policy, keys, args.blocks))
            touches[name].append(touch(policy, resident, len(keys)))
            sizes[name] = (footprint(policy) - sum(map(footprint, keys[: len(policy)]))) / len(policy)
    cost = {
        name: {"insert_us": spread(inserts[name]), "touch_us": spread(touches[name]), "bytes_per_block": round(sizes[name])}
        for name in POLICIES
    }
    print_table(["policy", "insert and evict, µs", "touch, µs", "bytes"], [[name, *row.values()] for name, row in cost.items()])
    lives: dict[str, dict[str, int]] = {}
    if args.churn:
        for name in POLICIES:
            policy = make_policy(name)
            lives[name] = {"bytes_before": churn(policy, 10_000), "bytes_after": churn(policy, args.churn, first=10_000)}
        print()
        print_table(["policy", "bytes after 10,000", f"and {args.churn:,} more"], [[name, *life.values()] for name, life in lives.items()])
    if args.json:
        print_json({"policies": cost, "churn": lives, "blocks": args.blocks})


if __name__ == "__main__":
    main()
