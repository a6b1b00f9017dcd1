"""Who holds a prompt's prefix: `kvpool.policy.prefix` beside NVIDIA Dynamo's RadixTree, as Python sees both, and how fast they are told.

`python -m bench.router_index [--json] [--rounds 5] [--workers 8,64,1000] [--no-peers]`. Prompts of 8K and 128K tokens in blocks of 16,
held in part by all workers (`bench/peers/dynamo_shape.py`). A match is hash + look-up + the answer for every holder by name. Contestants
take turns round by round. Dynamo is measured when it is installed:
`python3 -m venv $PEERS_HOME/v-dynamo && $PEERS_HOME/v-dynamo/bin/pip install ai-dynamo-runtime` (348 MB).

* `match_*_p99_ms`: hash (SHA-256 chain) and match; `find_*`: the match alone, of keys never looked up before; `hash_*`: the keys alone.
* `events_per_s`: changes of blocks taken in from a node's stream as it comes off the wire, in batches of 4,096.
* `bootstrap_*`: a router that starts beside a node with 100,000 blocks in mixed order, over gRPC from another process: until it has 95 %
  of them, and all.
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec
import numpy as np

from bench.peers.dynamo_shape import BLOCK_TOKENS, SIZES, TAIL, TOKENS, WORKERS, branch, parts, talks
from bench.pool_peers import home
from bench.report import print_json, print_table
from kvpool.block import BlockKey, chain_keys
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from kvpool.pool.events import KvEvents
from kvpool.request.events import DRAM
from kvpool.testing.events_twin import MemoryEvents
from kvpool.wire.channel import bind, make_server
from kvpool.wire.convert_events import batch_from_pb, batch_to_pb
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.events_server import add_events
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen.events_pb2 import EventBatch
from router.feeds.members import IndexFeed, MemberFeeds
from router.feeds.vllm_state import VllmBlocks, VllmCounts, unknown_adapter
from router.feeds.vllm_wire import read_batch
from router.testing.cluster import ScriptedCluster
from router.testing.vllm import stored

ROOT = bytes(32)
NODE = WorkerRef("node", "a" * 32, 1)
OPS = {"8k": 400, "128k": 60}
BLOCKS = 100_000
_rng = np.random.default_rng(1)
DOCUMENT: list[int] = _rng.integers(0, 128_000, TOKENS).tolist()
KEYS = chain_keys(ROOT, DOCUMENT, BLOCK_TOKENS)

Seconds = dict[str, list[float]]
T = TypeVar("T")


def own(count: int, parent: BlockKey | None) -> list[BlockKey]:
    """Keys of a conversation that nobody else has."""
    return chain_keys(ROOT, _rng.integers(0, 128_000, count * BLOCK_TOKENS), BLOCK_TOKENS, parent=parent)


def filled(workers: int) -> tuple[PrefixIndex[WorkerRef], dict[str, float]]:
    """An index of what `workers` hold; what it took."""
    told: list[tuple[WorkerRef, list[BlockKey], BlockKey | None]] = []
    for worker in range(workers):
        holder = WorkerRef("decode", f"{worker:032x}", 1)
        told += [(holder, KEYS[a:b], KEYS[a - 1] if a else None) for a, b in parts(workers, worker)]
        behind = KEYS[branch(workers, worker) - 1]
        told += [(holder, own(TAIL, behind), behind) for _ in range(talks(workers))]
    gc.collect()
    index: PrefixIndex[WorkerRef] = PrefixIndex()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for holder, keys, parent in told:
        index.stored(holder, keys, DRAM, parent=parent)
    took = time.perf_counter() - start
    blocks = sum(len(keys) for _, keys, _ in told)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return index, {"worker_blocks": blocks, "blocks_per_s": blocks / took, "bytes_per_worker_block": 1024 * grown / blocks}


def match_round(index: PrefixIndex[WorkerRef], size: str, workers: int, seconds: Seconds) -> None:
    """Some matches; of each the time of the hash, of the rest, and of both."""
    tokens = DOCUMENT[: SIZES[size]]
    for _ in range(OPS[size]):
        begun = time.perf_counter()
        keys = chain_keys(ROOT, tokens, BLOCK_TOKENS)
        hashed = time.perf_counter()
        answer = index.match(keys).leading()
        done = time.perf_counter()
        assert len(answer) == workers
        for what, value in (("hash", hashed - begun), ("find", done - hashed), ("match", done - begun)):
            seconds.setdefault(f"{what}_{size}_{workers}w", []).append(value)


@contextmanager
def dynamo() -> Iterator[Callable[[str, int], list[float]]]:
    """Dynamo's process: give it a case and how often, get the seconds."""
    command = [str(home() / "v-dynamo" / "bin" / "python"), "-m", "bench.peers.dynamo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        orders, answers = process.stdin, process.stdout
        assert orders is not None
        assert answers is not None
        answers.readline()

        def ask(case: str, ops: int) -> list[float]:
            orders.write(json.dumps({"case": case, "ops": ops}) + "\n")
            orders.flush()
            answer: list[float] = json.loads(answers.readline())["seconds"]
            return answer

        try:
            yield ask
        finally:
            orders.close()
            process.wait(30)


def told_rates() -> dict[str, float]:
    """Blocks a second that the index alone is told of, in calls of so many new ones, and removed again."""
    rates: dict[str, float] = {}
    chains = [own(512, None) for _ in range(100)]
    for size in (1, 16, 512):
        index: PrefixIndex[WorkerRef] = PrefixIndex()
        calls = [(keys[a : a + size], keys[a - 1] if a else None) for keys in chains for a in range(0, 512, size)]
        rates[f"stored_{size}_blocks_per_s"] = rate(len(calls) * size, partial(tell, index), calls)
        gone = [keys[::-1] for keys, _ in reversed(calls)]
        rates[f"removed_{size}_blocks_per_s"] = rate(len(calls) * size, partial(index.removed, NODE), gone)
        assert len(index) == 0
    return rates


def stream_rates() -> dict[str, float]:
    """Blocks a second from the wire into the index: a node's batches, in order and mixed, and a stock engine's messages."""
    rates: dict[str, float] = {}
    for name, mixed in (("events_per_s", False), ("events_mixed_per_s", True)):
        reader = node_events(mixed).watch(0, 0)
        raws = [batch_to_pb(batch).SerializeToString() for batch in iter(reader.next, None)]
        feed = IndexFeed(PrefixIndex(), NODE)
        rates[name] = rate(BLOCKS, partial(take, feed), raws)
        assert feed.complete
    prompts = [_rng.integers(0, 128_000, 2048).tolist() for _ in range(200)]
    payloads = [msgspec.msgpack.encode([1.0, [stored(tokens, BLOCK_TOKENS)], 0]) for tokens in prompts]
    blocks = VllmBlocks(PrefixIndex(), NODE, ROOT, BLOCK_TOKENS, unknown_adapter, VllmCounts())
    rates["vllm_events_per_s"] = rate(200 * 128, partial(hear, blocks), payloads)
    assert len(blocks) == 200 * 128
    return rates


def tell(index: PrefixIndex[WorkerRef], call: tuple[list[BlockKey], BlockKey | None]) -> None:
    index.stored(NODE, call[0], DRAM, parent=call[1])


def take(feed: IndexFeed, raw: bytes) -> None:
    feed.apply(batch_from_pb(EventBatch.FromString(raw)))


def hear(blocks: VllmBlocks, payload: bytes) -> None:
    blocks.apply(read_batch(payload))


def rate(count: int, do: Callable[[T], object], what: Sequence[T]) -> float:
    """How many of `count` a second, when each of `what` is done once."""
    gc.collect()
    start = time.perf_counter()
    for one in what:
        do(one)
    return count / (time.perf_counter() - start)


def node_events(mixed: bool) -> KvEvents:
    """What a node with 100,000 blocks in chains of 128 has to tell, in order or in none."""
    told: list[tuple[BlockKey, BlockKey | None, int]] = []
    while len(told) < BLOCKS:
        keys = own(min(128, BLOCKS - len(told)), None)
        told += [(key, keys[i - 1] if i else None, BLOCK_TOKENS * i) for i, key in enumerate(keys)]
    if mixed:
        random.Random(1).shuffle(told)
    events = KvEvents(1)
    for key, parent, depth in told:
        events.stored(DRAM, key, parent, depth)
    return events


def serve_node(ends: Connection) -> None:
    """A node's process: serves its events until it is told to stop."""

    async def serve() -> None:
        twin, server = MemoryEvents(NodeIdentity(NODE.id, 1)), make_server()
        twin.events = node_events(mixed=True)
        add_events(server, twin)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        ends.send(address)
        await asyncio.to_thread(ends.recv)
        await server.stop(None)

    asyncio.run(serve())


async def bootstrap(address: str) -> tuple[float, float]:
    """Seconds from a router's start until it has 95 % of the node's blocks, and all."""
    cluster, index = ScriptedCluster("m"), PrefixIndex[WorkerRef]()
    cluster.add("node", None, id=NODE.id)
    start, most = time.perf_counter(), 0.0
    feeds = MemberFeeds(cluster, index, lambda member: EventsRpc(address))
    feeds.start()
    async with asyncio.timeout(60):
        while not feeds.complete():
            await asyncio.sleep(0.001)
            if not most and index.held(NODE) >= 0.95 * BLOCKS:
                most = time.perf_counter() - start
    took = time.perf_counter() - start
    assert index.held(NODE) == BLOCKS
    await feeds.close()
    return most or took, took


def bootstraps(rounds: int) -> Seconds:
    """The same, some times."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    node = spawn.Process(target=serve_node, args=(there,), daemon=True)
    node.start()
    address = here.recv()
    times = [asyncio.run(bootstrap(address)) for _ in range(rounds)]
    here.send("stop")
    node.join(30)
    return {"bootstrap_100k_95": [most for most, _ in times], "bootstrap_100k": [took for _, took in times]}


def percentile(values: Sequence[float], share: float) -> float:
    """Of unsorted `values`, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def in_ms(seconds: Seconds) -> dict[str, float]:
    """Median and 99th percentile of each."""
    return {f"{name}_{at}_ms": 1e3 * percentile(values, int(at[1:]) / 100) for name, values in seconds.items() for at in ("p50", "p99")}


def measure(workers: Sequence[int], rounds: int, ask: Callable[[str, int], list[float]] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours and Dynamo's figures; matches taken in turn."""
    ours, theirs, built = Seconds(), Seconds(), {}
    for count in workers:
        index, built[f"build_{count}w"] = filled(count)
        for counted in [False] + [True] * rounds:
            for size in SIZES:
                match_round(index, size, count, ours if counted else {})
                for case in (f"find_{size}_{count}w", f"full_{size}_{count}w") if ask is not None else ():
                    values = ask(case, OPS[size]) if ask is not None else []
                    if counted:
                        theirs.setdefault(case, []).extend(values)
        del index
        gc.collect()
    mine: dict[str, Any] = {**in_ms(ours), **built, **told_rates(), **stream_rates()}
    if ask is None:
        return mine, {}
    told = {f"stored_{size}_blocks_per_s": 1000 * size / min(ask(f"tell_{size}", 3)) for size in (1, 16, 512)}
    return mine, {**in_ms(theirs), **told}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.router_index", description="Finding who holds a prefix.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    workers = [int(count) for count in args.workers.split(",")]
    if args.rounds < 1 or not set(workers) <= set(WORKERS):
        parser.error(f"--rounds must be positive and --workers among {WORKERS}")
    peers: dict[str, Any] = {}
    python = home() / "v-dynamo" / "bin" / "python"
    if args.no_peers or not python.exists():
        told = (
            "not asked for" if args.no_peers else f"not installed: python3 -m venv {home()}/v-dynamo && ... pip install ai-dynamo-runtime"
        )
        ours, peers["dynamo"] = measure(workers, args.rounds, None)[0], told
    else:
        with dynamo() as ask:
            ours, peers["dynamo"] = measure(workers, args.rounds, ask)
    boots = bootstraps(3)
    ours |= {f"{name}_ms": 1e3 * percentile(values, 0.5) for name, values in boots.items()}
    theirs = peers["dynamo"] if isinstance(peers["dynamo"], dict) else {}
    for count in workers:
        for size in SIZES:
            name = f"find_{size}_{count}w_p50_ms"
            if name in theirs:
                ours[f"find_{size}_{count}w_over_dynamo"] = ours[name] / theirs[name]
    rows = [
        [name, f"{value:,.3f}", f"{theirs[twin]:,.3f}" if (twin := name.replace("match", "full")) in theirs else ""]
        for name, value in ours.items()
        if isinstance(value, float)
    ]
    print_table(["", "kvpool", "dynamo"], rows)
    if args.json:
        print_json({**ours, "peers": peers})


if __name__ == "__main__":
    main()
