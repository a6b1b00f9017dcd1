"""A real node at 100 % fill under mixed work for a long time: `python -m kvpool.testing.soak --minutes 10 [--ssd DIR] [--json]`.

Eight clients put, get, pin, unpin, probe, abandon reservations and vanish with leases, over four block sizes at once, on a node that can
hold a small part of what they write. Every payload describes itself, so a wrong byte can't pass for a right one. Every call has a
deadline: a deadlock shows as calls that end by it (`late`). The books are read all the time and must balance; memory of the node's
process is compared between the time the pool had been full for a while and the end; and at the end everything that was held must come
back.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvpool.block import Geometry, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.client.transfer import Payload
from kvpool.errors import RemoteError
from kvpool.node.service import FENCE_NS
from kvpool.request.pool import NodeDescription, Outcome, Reservation
from kvpool.testing.node_process import NodeProcess
from kvpool.units import SECOND
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

CLIENTS = 8
LIMIT_S = 20.0
BLOCK_TOKENS = 16
HEADS = (1, 3, 8, 21)
"""KV heads of the four models: frames of about 16, 48, 128 and 336 KiB."""
_CHAINS = 200  # different prompts that the clients share
_SETTLE_S = 15.0 + FENCE_NS / SECOND  # bytes of writers that vanished wait behind their fence
_CAPACITY = "96MiB"


def namespace_of(heads: int) -> Namespace:
    """A made-up model with `heads` KV heads."""
    geometry = Geometry.uniform(layers=2, kv_heads=heads, head_dim=64, block_tokens=BLOCK_TOKENS, dtype="float32")
    return Namespace(model=f"soak-{heads}", revision="1", weights_digest=bytes(32), geometry=geometry, rope="none")


@dataclass(kw_only=True)
class Tally:
    """What happened. `violations` must stay empty."""

    done: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def violation(self, text: str) -> None:
        """Remember one, the first hundred in words."""
        self.done["violations"] += 1
        if len(self.violations) < 100:
            self.violations.append(text)


class Worker:
    """One client: does one thing after the other until told to stop."""

    def __init__(self, number: int, address: str, node: NodeIdentity, tally: Tally) -> None:
        self._random = random.Random(number)
        self._address, self._node, self._tally = address, node, tally
        self._owner = f"soak-{number}"
        self._clients: list[AsyncPoolClient] = []

    async def run(self, until_s: float) -> None:
        """Work until then."""
        self._clients = [await AsyncPoolClient.open(self._address, namespace_of(heads)) for heads in HEADS]
        rpc, admin = PoolRpc(self._address, self._node), AdminRpc(self._address, self._node)
        try:
            while time.monotonic() < until_s:
                await self._one(rpc, admin)
        finally:
            for client in self._clients:
                await client.close()
            await rpc.close()
            await admin.close()

    async def _one(self, rpc: PoolRpc, admin: AdminRpc) -> None:
        kind = self._random.choices(("put", "get", "probe", "abandon", "vanish", "pin", "unpin"), (30, 40, 10, 6, 4, 5, 5))[0]
        client = self._random.choice(self._clients)
        prompt = self._random.randrange(_CHAINS)
        tokens = [prompt * 1000 + i for i in range(BLOCK_TOKENS * self._random.randrange(1, 24))]
        start = time.monotonic()
        try:
            async with asyncio.timeout(2 * LIMIT_S):
                await getattr(self, f"_{kind}")(client, client.keys(tokens), rpc, admin)
        except TimeoutError:
            self._tally.violation(f"{kind} did not end within {2 * LIMIT_S} s")
        except RemoteError as error:
            self._tally.violation(f"{kind}: {error}")
        self._tally.done[kind] += 1
        self._tally.done["late"] += time.monotonic() - start > LIMIT_S

    async def _put(self, client: AsyncPoolClient, chain: Sequence[Any], rpc: PoolRpc, admin: AdminRpc) -> None:
        def fill(index: int, payload: Payload) -> None:
            payload[:] = np.resize(np.frombuffer(chain[index], np.uint8), payload.size)

        held = await client.store(chain, 0, [BLOCK_TOKENS] * len(chain), fill, deadline_ns=_deadline_ns())
        self._tally.done["put_blocks"] += held
        self._tally.done["put_refused"] += len(chain) - held

    async def _get(self, client: AsyncPoolClient, chain: Sequence[Any], rpc: PoolRpc, admin: AdminRpc) -> None:
        def sink(index: int, payload: Payload) -> None:
            if not np.array_equal(payload, np.resize(np.frombuffer(chain[index], np.uint8), payload.size)):
                self._tally.violation(f"wrong bytes in block {chain[index].hex()}")

        self._tally.done["got_blocks"] += await client.load(chain, 0, [BLOCK_TOKENS] * len(chain), sink, deadline_ns=_deadline_ns())

    async def _probe(self, client: AsyncPoolClient, chain: Sequence[Any], rpc: PoolRpc, admin: AdminRpc) -> None:
        await client.lookup(chain)

    async def _abandon(self, client: AsyncPoolClient, chain: Sequence[Any], rpc: PoolRpc, admin: AdminRpc) -> None:
        """Reserve and give back without a commit."""
        length = client.namespace.geometry.payload_bytes(BLOCK_TOKENS)
        other = [self._random.randbytes(32) for _ in chain]
        lease_id, grants = await rpc.reserve(self._owner, 5_000, [Reservation(key, b"", 0, length) for key in other], LIMIT_S)
        self._tally.done["granted"] += sum(outcome is Outcome.GRANTED for outcome, _ in grants)
        if lease_id:
            await rpc.release(lease_id, (), LIMIT_S)

    async def _vanish(self, client: AsyncPoolClient, chain: Sequence[Any], rpc: PoolRpc, admin: AdminRpc) -> None:
        """Take a short lease of either kind and never end it."""
        if self._random.random() < 0.5:
            await rpc.acquire(self._owner, 500, chain[:4], LIMIT_S)
        else:
            await rpc.reserve(self._owner, 500, [Reservation(self._random.randbytes(32), b"", 0, 16_384)], LIMIT_S)

    async def _pin(self, client: AsyncPoolClient, chain: Sequence[Any], rpc: PoolRpc, admin: AdminRpc) -> None:
        hard = self._random.random() < 0.3
        await admin.pin(chain[:8], LIMIT_S, owner=self._owner, duration_ms=self._random.randrange(100, 5_000), hard=hard)

    async def _unpin(self, client: AsyncPoolClient, chain: Sequence[Any], rpc: PoolRpc, admin: AdminRpc) -> None:
        await admin.unpin(chain[:8], LIMIT_S, owner=self._owner)


@dataclass(frozen=True, kw_only=True)
class Report:
    """How it went. Bytes; `rss_growth` as a share of the resident memory once the pool was full.

    At single moments the pool is less full than `fill_median`: a reservation that is given back frees what was evicted for it.
    """

    seconds: float
    operations: dict[str, int]
    violations: list[str]
    fill_median: float
    rss_full: int
    rss_end: int
    rss_growth: float
    anonymous_full: int
    anonymous_end: int
    blocks: int
    counters: dict[str, int]


async def soak(process: NodeProcess, seconds: float) -> Report:
    """Work on the node for `seconds`, then let everything end and look."""
    tally, fills, memory = Tally(), list[float](), dict[str, tuple[int, int]]()
    rpc = PoolRpc(process.address)
    first = await rpc.describe(LIMIT_S)
    node = NodeIdentity(first.node_id, first.incarnation)
    start = time.monotonic()
    until_s = start + seconds
    workers = [asyncio.create_task(Worker(i, process.address, node, tally).run(until_s)) for i in range(CLIENTS)]
    while time.monotonic() < until_s:
        await asyncio.sleep(min(0.5, seconds / 50))
        books = await rpc.describe(LIMIT_S)
        _check_books(books, tally)
        if time.monotonic() > start + seconds / 3:
            memory.setdefault("full", rss_of(process.process.pid))
            fills.append(1 - books.free_bytes / books.capacity_bytes)
    memory["end"] = rss_of(process.process.pid)
    await asyncio.gather(*workers)
    last = await _settled(rpc, tally)
    await rpc.close()
    (full, full_anonymous), (end, end_anonymous) = memory["full"], memory["end"]
    return Report(
        seconds=time.monotonic() - start,
        operations=dict(sorted(tally.done.items())),
        violations=tally.violations,
        fill_median=median(fills),
        rss_full=full,
        rss_end=end,
        rss_growth=end / full - 1,
        anonymous_full=full_anonymous,
        anonymous_end=end_anonymous,
        blocks=last.blocks,
        counters=dict(last.counters),
    )


async def _settled(rpc: PoolRpc, tally: Tally) -> NodeDescription:
    """The node once all leases and pins have run out; a violation when they don't."""
    end = time.monotonic() + _SETTLE_S
    while True:
        books = await rpc.describe(LIMIT_S)
        _check_books(books, tally)
        if not (books.read_leases or books.write_leases or books.pinned_bytes):
            return books
        if time.monotonic() > end:
            tally.violation(
                f"after {_SETTLE_S} s {books.read_leases} + {books.write_leases} leases and {books.pinned_bytes} bytes are held"
            )
            return books
        await asyncio.sleep(0.1)


def _check_books(books: NodeDescription, tally: Tally) -> None:
    if books.free_bytes + books.used_bytes + books.pinned_bytes != books.capacity_bytes:
        tally.violation(f"books: {books.free_bytes} + {books.used_bytes} + {books.pinned_bytes} != {books.capacity_bytes}")


def rss_of(pid: int) -> tuple[int, int]:
    """(resident bytes, of these anonymous ones) of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))  # type: ignore[return-value]


def _deadline_ns() -> int:
    return time.monotonic_ns() + int(LIMIT_S * SECOND)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kvpool.testing.soak", description="Work on a full node for a long time.")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--ssd", type=Path, default=None, help="directory of an SSD tier; memory only without")
    parser.add_argument("--capacity", default=_CAPACITY, help="memory of the node")
    parser.add_argument("--policy", default=None, help="eviction policy, by name")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    flags = ["--capacity", args.capacity, *(["--policy", args.policy] if args.policy else [])]
    flags += ["--ssd", str(args.ssd), "--ssd-capacity", "1GiB"] if args.ssd else []
    process = NodeProcess(*flags)
    try:
        report = asyncio.run(soak(process, args.minutes * 60))
    finally:
        status = process.stop()
    for name, value in asdict(report).items():
        if name != "violations":
            print(f"{name}: {value}")
    for text in report.violations:
        print(f"VIOLATION: {text}")
    if args.json:
        print(json.dumps({**asdict(report), "exit_status": status}), flush=True)
    raise SystemExit(1 if report.violations or status or report.rss_growth > 0.02 else 0)


if __name__ == "__main__":
    main()
