"""Sessions between real processes, one of which is killed at the worst moment."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool.errors import UnavailableError
from kvpool.pool import PoolLimits
from kvpool.request.pool import NodeDescription
from kvpool.testing.node_process import NodeProcess
from kvpool.units import SECOND
from kvpool.wire.pool_client import PoolRpc
from tests.node.session_node import DEADLINE_S, LENGTH, Client, Host, chain, config, keys_of, suffixes_in

VICTIM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from kvpool.wire.pool_client import PoolRpc
from tests.node.session_node import *

async def describe():
    rpc = PoolRpc(sys.argv[2])
    described = await rpc.describe(DEADLINE_S)
    await rpc.close()
    return described

client = Client(asyncio.run(describe()))
slab = client.session.slab(8 * LENGTH)
client.put(slab, chain("a", 2))
client.session.reserve(chain("b", 3))
hold = client.board.hold(client.board.find(keys_of("a", 2), 1), 2)
assert hold is not None
print("ready", flush=True)
time.sleep(600)
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture
def victims() -> Iterator[list[subprocess.Popen[str]]]:
    """Clients to kill."""
    made: list[subprocess.Popen[str]] = []
    yield made
    for process in made:
        process.kill()
        process.wait(DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


async def test_client_killed_in_the_middle_leaves_nothing_behind(tmp_path: Path, victims: list[subprocess.Popen[str]]) -> None:
    """With a slab, reservations it never committed and holds: all of it goes with its process, long before any lease would end."""
    async with Host(config(tmp_path, limits=PoolLimits(fence_ns=30 * SECOND))) as host:
        command = [sys.executable, "-c", VICTIM, str(ROOT), host.node.address]
        victims.append(await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True))
        output = victims[0].stdout
        assert output is not None
        assert await asyncio.to_thread(output.readline) == "ready\n"
        counters = await host.counters()
        names = ("sessions", "session_leases", "slab_bytes", "holds")
        assert [counters[name] for name in names] == [1, 2, 6 * LENGTH, 2]
        key = keys_of("a", 1)[0]
        assert host.pool.discard(key)
        assert host.pool.books().pinned == (6 + 3 + 1) * LENGTH
        victims[0].kill()
        await host.until(lambda: host.pool.books().pinned == 0)
        host.pool.check()
        counters = await host.counters()
        assert [counters[name] for name in names] == [0, 0, 0, 0]
        assert host.pool.books().used == LENGTH


async def test_client_of_a_killed_node_learns_it_at_once_and_the_next_node_sweeps_up(tmp_path: Path) -> None:
    """Its session says so without waiting for a deadline; what it has mapped stays readable; arena and socket don't stay for ever."""
    node = await asyncio.to_thread(NodeProcess, "--capacity", "1MiB", "--offer", "shm,grpc", arena_dir=tmp_path)
    try:
        client = await asyncio.to_thread(Client, await _describe(node))
        slab = await asyncio.to_thread(client.session.slab, 4 * LENGTH)
        assert slab is not None
        await asyncio.to_thread(client.put, slab, chain("a", 2))
        await asyncio.to_thread(node.kill)
        assert not client.session.alive
        with pytest.raises(UnavailableError):
            client.session.slab(LENGTH, timeout_s=600)
        assert client.found(keys_of("a", 2)) == [True, True]
        client.close()
        assert suffixes_in(tmp_path) == [".arena", ".sock"]
        async with Host(config(tmp_path)):
            assert suffixes_in(tmp_path) == [".arena", ".sock"]
    finally:
        await asyncio.to_thread(node.stop)


async def _describe(node: NodeProcess) -> NodeDescription:
    rpc = PoolRpc(node.address)
    described = await rpc.describe(DEADLINE_S)
    await rpc.close()
    return described
