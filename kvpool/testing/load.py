"""A client at work on a pool, one JSON line a request: `python -m kvpool.testing.load --pool URL --seed 1 --seconds 60`.

It does what a worker does: takes one of a fixed number of prompts (a few of them wanted often), loads what the pool has of it, makes the
rest itself and stores that. Every payload says which block it is in every word, so a wrong byte can't pass for a right one. What went wrong
is written down: a request has *failed* when anything was raised or when it took longer than its deadline; a miss is no failure.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvpool.block import BlockKey, Geometry, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.client.transfer import Payload
from kvpool.units import SECOND

BLOCK_TOKENS = 16
GEOMETRY = Geometry.uniform(layers=2, kv_heads=2, head_dim=64, block_tokens=BLOCK_TOKENS, dtype="float32")
"""32 KiB a block."""
NAMESPACE = Namespace(model="load", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
SHORTEST, LONGEST = 4, 40
"""Blocks of a prompt: one or two extents."""
DEADLINE_S = 2.0
_GRACE_S = 1.0


class Done(NamedTuple):
    """One request. `at_ns`: when it began (monotonic, comparable on one machine); `load_us`: until its blocks were there or missed."""

    at_ns: int
    load_us: int
    chain: int
    hit: int
    total: int
    wrong: int
    error: str


def prompt(chain: int) -> list[int]:
    """The tokens of prompt number `chain`, the same everywhere."""
    rng = random.Random(chain)
    return [rng.randrange(1 << 16) for _ in range(BLOCK_TOKENS * rng.randint(SHORTEST, LONGEST))]


def content(key: BlockKey, out: Payload) -> None:
    """Fill `out` with the bytes that block `key` must have."""
    out.view(np.uint64)[:] = int.from_bytes(key[:8], "little") ^ np.arange(out.size // 8, dtype=np.uint64)


def is_right(key: BlockKey, payload: Payload) -> bool:
    """Whether `payload` is what block `key` must have."""
    expected = np.empty_like(payload)
    content(key, expected)
    return bool(np.array_equal(payload, expected))


class Load:
    """Requests one after the other, from one client."""

    def __init__(self, pool: AsyncPoolClient, *, seed: int, chains: int, rate: float, deadline_s: float = DEADLINE_S) -> None:
        """`rate`: requests a second at most; `chains`: how many prompts there are, the first ones wanted most."""
        self._deadline_s = deadline_s
        self._pool = pool
        self._random = random.Random(seed)
        self._pause_s = 1 / rate
        self._chains = [pool.keys(prompt(number)) for number in range(chains)]
        self._weights = [1 / (number + 3) for number in range(chains)]

    async def fill(self) -> None:
        """Store every prompt once, whatever the pool has."""
        for chain in self._chains:
            await self._store(chain, 0, 10 * SECOND)

    async def one(self) -> Done:
        """One request, from choice to end."""
        number = self._random.choices(range(len(self._chains)), self._weights)[0]
        chain = self._chains[number]
        wrong: list[int] = []

        def sink(index: int, payload: Payload) -> None:
            if not is_right(chain[index], payload):
                wrong.append(index)

        start_ns, hit, error, loaded_ns = time.monotonic_ns(), 0, "", 0
        try:
            async with asyncio.timeout(self._deadline_s + _GRACE_S):
                deadline_ns = start_ns + int(self._deadline_s * SECOND)
                hit = await self._pool.load(chain, 0, [BLOCK_TOKENS] * len(chain), sink, deadline_ns=deadline_ns)
                loaded_ns = time.monotonic_ns()
                if hit < len(chain):
                    await self._store(chain, hit, self._deadline_s * SECOND)
        except Exception as failure:  # a load tells, whatever happened
            error = f"{type(failure).__name__}: {failure}"
        taken_ns = (loaded_ns or time.monotonic_ns()) - start_ns
        return Done(start_ns, taken_ns // 1000, number, hit, len(chain), len(wrong), error)

    async def run(self, seconds: float) -> None:
        """Requests for so long, each written to stdout when it ends."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            print(json.dumps(await self.one()), flush=True)
            await asyncio.sleep(self._random.expovariate(1) * self._pause_s)

    async def _store(self, chain: Sequence[BlockKey], first: int, left_ns: float) -> None:
        counts = [BLOCK_TOKENS] * (len(chain) - first)
        deadline_ns = time.monotonic_ns() + int(left_ns)
        await self._pool.store(chain, first, counts, lambda index, out: content(chain[index], out), deadline_ns=deadline_ns)


async def _main(options: argparse.Namespace) -> None:
    pool = await AsyncPoolClient.open(options.pool, NAMESPACE, transport=options.transport, eager=True)
    async with pool:
        load = Load(pool, seed=options.seed, chains=options.chains, rate=options.rate, deadline_s=options.deadline)
        if options.fill:
            await load.fill()
        print("ready", flush=True)
        await load.run(options.seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", required=True, help="cluster URL or node addresses")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--chains", type=int, default=200)
    parser.add_argument("--rate", type=float, default=20, help="requests a second, about")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, metavar="S", help="a request that takes longer has failed")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--fill", action="store_true", help="store every prompt before the first request")
    asyncio.run(_main(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
