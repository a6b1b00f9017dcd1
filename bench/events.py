"""Cost of telling what a node holds: changes a second at the core, what the pool pays for being watched, a snapshot in time and memory.

`python -m bench.events [--json] [--blocks 100000] [--rounds 5]`. All in one process. What counts is CPU time of this process; over gRPC,
where both ends share it, time on the wall.
"""

import argparse
import asyncio
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import aclosing

from bench.core import chain, items_of, put
from bench.report import print_json, print_table, spread
from kvpool.block import BlockKey
from kvpool.client.feed import NodeFeed
from kvpool.clock import MonotonicClock
from kvpool.node.events import NodeEvents
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import PoolState
from kvpool.pool.blocks import Watcher
from kvpool.pool.events import KvEvents
from kvpool.request.events import DRAM, MAX_BATCH
from kvpool.testing.events_twin import MemoryEvents
from kvpool.wire.channel import bind, make_server
from kvpool.wire.convert_events import batch_from_pb, batch_to_pb
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.events_server import add_events
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen.events_pb2 import EventBatch

FRAME_BYTES = 360 * 1024 + 256
BATCH = 512
CALLS = 16


def cpu_s(run: Callable[[], object]) -> float:
    start = time.process_time_ns()
    run()
    return (time.process_time_ns() - start) / 1e9


def core_rate(keys: Sequence[BlockKey]) -> dict[str, float]:
    """Changes a second: told to the core, and read from it and spelled, in batches as they come."""
    events = KvEvents(1)
    reader = events.watch(0, 0)
    reader.next()
    told = read = 0.0

    def tell(some: Sequence[BlockKey]) -> None:
        for key in some:
            events.stored(DRAM, key, keys[0], 16)

    def send() -> None:
        while (batch := reader.next()) is not None:
            batch_to_pb(batch).SerializeToString()

    def forget(some: Sequence[BlockKey]) -> None:
        for key in some:
            events.removed(DRAM, key)

    for start in range(0, len(keys), BATCH):
        some = keys[start : start + BATCH]
        told += cpu_s(lambda some=some: tell(some))  # type: ignore[misc]
        read += cpu_s(send)
    removed = cpu_s(lambda: forget(keys))
    count = len(keys)
    return {"stored_per_s": count / told, "removed_per_s": count / removed, "sent_per_s": count / read}


def watched_pool(rounds: int) -> dict[str, list[float]]:
    """Microseconds per key of reserve and commit in a full pool: unwatched, watched, and settling what was told."""
    seconds: dict[str, list[float]] = {"unwatched": [], "watched": [], "settle": []}
    events = NodeEvents("0" * 32, 1, MonotonicClock())
    watches: dict[str, Watcher | None] = {"unwatched": None, "watched": events.arena_changed}
    pools = {name: PoolState(FRAME_BYTES * BATCH * 4, PrefixLru(), watch=watch) for name, watch in watches.items()}
    turn = 0
    for round_ in range(rounds + 1):
        made = {name: [items_of(chain(f"{name}{turn + i}", BATCH)) for i in range(CALLS)] for name in pools}
        turn += CALLS
        took = dict.fromkeys(seconds, 0.0)
        for call in range(CALLS):
            for name, pool in pools.items():
                took[name] += cpu_s(lambda pool=pool, name=name: put(pool, made[name][call]))  # type: ignore[misc]  # noqa: B023
            took["settle"] += cpu_s(events.settle)
        if round_:
            for name, value in took.items():
                seconds[name].append(value / CALLS / BATCH * 1e6)
    return seconds


def filled(keys: Sequence[BlockKey]) -> KvEvents:
    events = KvEvents(1)
    for at, key in enumerate(keys):
        events.stored(DRAM, key, keys[at - 1] if at else None, 16 * at)
    return events


def snapshot(keys: Sequence[BlockKey]) -> dict[str, float]:
    """One consumer from nothing to everything, and the longest step that a node's loop is held for."""
    reader, feed = filled(keys).watch(0, 0), NodeFeed()
    gc.collect()  # the one that all these blocks are due for, snapshot or not
    steps, raws = [], []
    for _ in range(-(-len(keys) // MAX_BATCH)):
        start = time.process_time()
        made = reader.next()
        assert made is not None
        raws.append(batch_to_pb(made).SerializeToString())
        steps.append(time.process_time() - start)
    start = time.process_time()
    for raw in raws:
        feed.apply(batch_from_pb(EventBatch.FromString(raw)))
    taken = time.process_time() - start
    assert feed.complete
    assert len(feed) == len(keys)
    return {
        "parts": len(steps),
        "node_ms": 1e3 * sum(steps),
        "median_step_ms": 1e3 * statistics.median(steps),
        "longest_step_ms": 1e3 * max(steps),
        "largest_part_bytes": max(map(len, raws)),
        "consumer_ms": 1e3 * taken,
    }


def memory(keys: Sequence[BlockKey]) -> dict[str, float]:
    """What the table takes, keys apart, and what a snapshot takes beside it."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    events = filled(keys)
    table = tracemalloc.get_traced_memory()[0] - before
    reader = events.watch(0, 0)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    while (batch := reader.next()) is not None:
        batch_to_pb(batch).SerializeToString()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return {"peak_bytes": peak, "table_bytes_per_block": table / len(keys)}


async def over_grpc(keys: Sequence[BlockKey]) -> dict[str, float]:
    """A snapshot and a keep-alive through a server and a client on one loop: both ends' work, and gRPC's."""
    twin, server = MemoryEvents(NodeIdentity("0" * 32, 1)), make_server()
    twin.events = filled(keys)
    add_events(server, twin)
    rpc, feed = EventsRpc(bind(server, "127.0.0.1:0")), NodeFeed()
    await server.start()
    start = time.perf_counter()
    async with aclosing(rpc.watch(0, 0, 10)) as batches:
        async for batch in batches:
            feed.apply(batch)
            if feed.complete:
                break
    took = time.perf_counter() - start
    assert len(feed) == len(keys)
    await rpc.close()
    await server.stop(None)
    return {"over_grpc_ms": 1e3 * took}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.events", description="What telling of changes costs.")
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.blocks < 1 or args.rounds < 1:
        parser.error("--blocks and --rounds must be positive")
    keys = [BlockKey(number.to_bytes(32, "little")) for number in range(args.blocks)]
    rates = [core_rate(keys) for _ in range(args.rounds)]
    core = {name: spread([rate[name] for rate in rates]) for name in rates[0]}

    async def in_loop() -> dict[str, list[float]]:
        return watched_pool(args.rounds)

    pool = {name: spread(values) for name, values in asyncio.run(in_loop()).items()}
    shot = {**snapshot(keys), **asyncio.run(over_grpc(keys)), **memory(keys)}
    print_table(["core", "changes a second"], [[name, value] for name, value in core.items()])
    print_table(["full pool, reserve and commit", "µs per key"], [[name, value] for name, value in pool.items()])
    print_table([f"snapshot of {args.blocks:,} blocks", ""], [[name, f"{value:,.1f}"] for name, value in shot.items()])
    if args.json:
        print_json({"core": core, "pool_us_per_key": pool, "snapshot": shot})


if __name__ == "__main__":
    main()
