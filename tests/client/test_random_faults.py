"""Loads and stores of random patience, some cancelled, while the network freezes and breaks: right bytes, in order, and nothing left."""

import asyncio
import contextlib
import random
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import Namespace
from kvpool.client import AsyncPoolClient
from kvpool.testing.pool_cluster import PoolCluster
from kvpool.units import SECOND

Payload = npt.NDArray[np.uint8]
BLOCKS = 64
COUNTS = [16] * BLOCKS


async def one_call(client: AsyncPoolClient, dice: random.Random) -> None:
    """One load or store of one of six chains, given up by deadline or cancelled or neither."""
    first, got = dice.randrange(6), list[int]()
    chain = client.keys([first, *range(16 * BLOCKS - 1)])
    deadline_ns = time.monotonic_ns() + int(dice.choice([0.02, 0.1, 0.5, 3.0]) * SECOND)

    def fill(index: int, payload: Payload) -> None:
        payload[:] = (7 * index + first) % 251

    def sink(index: int, payload: Payload) -> None:
        assert (payload == (7 * index + first) % 251).all()
        got.append(index)

    loads = dice.random() < 0.5
    call = client.load(chain, 0, COUNTS, sink, deadline_ns=deadline_ns)
    other = client.store(chain, 0, COUNTS, fill, deadline_ns=deadline_ns)
    wanted, unwanted = (call, other) if loads else (other, call)
    unwanted.close()
    work = asyncio.create_task(wanted)
    if dice.random() < 0.3:
        await asyncio.sleep(0.05 * dice.random())
        work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        count = await work
        assert count == len(got) or not loads
    assert got == list(range(len(got)))


@pytest.mark.parametrize("seed", range(3))
async def test_faults_at_random_leave_no_lease_no_call_and_no_wrong_byte(tmp_path: Path, namespace: Namespace, seed: int) -> None:
    """Three nodes, two copies; each node's leases are counted when all is over."""
    dice, cluster = random.Random(seed), PoolCluster(tmp_path)
    cluster.configure(copies=2)
    spots = [await cluster.add() for _ in range(3)]

    async def faults() -> None:
        for _ in range(8):
            relay = dice.choice(spots).relay
            dice.choice([relay.freeze, relay.cut])()
            await asyncio.sleep(0.6 * dice.random())
            relay.mend()
            await asyncio.sleep(0.3 * dice.random())

    async with await AsyncPoolClient.open(cluster.membership, namespace, transport=("auto", "grpc")[seed % 2]) as client:
        trouble = asyncio.create_task(faults())
        while not trouble.done():
            await asyncio.gather(*(one_call(client, dice) for _ in range(6)))
        await trouble
        for spot in spots:
            async with asyncio.timeout(75):  # write leases that ran out keep their bytes for another half minute
                while (books := await spot.describe()).read_leases or books.write_leases or books.pinned_bytes:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        core = client._core
        async with asyncio.timeout(30):
            while len(core.background._tasks) > 1 or any(record.calls for record in core.links.health._records.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    await cluster.stop()
