"""The same with real processes and a real membership server: kill -9, SIGSTOP, and the operator's command."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import BlockKey
from kvpool.client import AsyncPoolClient
from kvpool.cluster import Membership, open_membership
from kvpool.cluster.embedded import EmbeddedServer
from kvpool.testing.node_process import NodeProcess
from kvpool.units import SECOND

from .cluster_rig import BLOCK_TOKENS, NAMESPACE

LEASE_MS = 1000
LIMIT_S = 60.0
BLOCKS = 8


class Processes:
    """Nodes of one cluster, by name; `settled` waits until the operator's view says that nothing is left to be moved."""

    def __init__(self, url: str, membership: Membership) -> None:
        self.url = url
        self.membership = membership
        self.nodes: dict[str, NodeProcess] = {}

    def start(self, *ids: str) -> None:
        for node_id in ids:
            flags = ("--cluster", self.url, "--id", node_id, "--capacity", "8MiB", "--offer", "shm,grpc", "--host", f"h{node_id[-1]}")
            self.nodes[node_id] = NodeProcess(*flags)
        self.wait(lambda states: states == dict.fromkeys(self.nodes, "active"))

    def wait(self, condition: Callable[[dict[str, str]], bool]) -> None:
        """Until the members' states satisfy `condition`."""
        end = time.monotonic_ns() + int(LIMIT_S * SECOND)
        self.membership.wait(lambda members: condition({m.id: m.info["state"] for m in members if m.role == "node"}), end)

    def kvpool(self, *arguments: str, exit_code: int = 0) -> Any:
        command = [sys.executable, "-m", "kvpool.cli", *arguments, "--cluster", self.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == exit_code, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    server = EmbeddedServer.start(tmp_path, lease_ms=LEASE_MS)
    membership = open_membership(server.url)
    made = Processes(server.url, membership)
    try:
        yield made
    finally:
        for process in made.nodes.values():
            process.stop()
        membership.close()
        server.close()


async def put(client: AsyncPoolClient, chains: Sequence[Sequence[BlockKey]]) -> None:
    for chain in chains:

        def fill(index: int, payload: npt.NDArray[np.uint8], chain: Sequence[BlockKey] = chain) -> None:
            payload[:] = chain[index][0]

        held = await client.store(chain, 0, [BLOCK_TOKENS] * len(chain), fill, deadline_ns=time.monotonic_ns() + 10 * SECOND)
        assert held == len(chain)


async def got(client: AsyncPoolClient, chains: Sequence[Sequence[BlockKey]]) -> int:
    """Blocks that come back whole and right."""
    total = 0
    for chain in chains:

        def sink(index: int, payload: npt.NDArray[np.uint8], chain: Sequence[BlockKey] = chain) -> None:
            assert np.all(payload == chain[index][0])

        total += await client.load(chain, 0, [BLOCK_TOKENS] * len(chain), sink, deadline_ns=time.monotonic_ns() + 10 * SECOND)
    return total


def chains_of(client: AsyncPoolClient, count: int) -> list[list[BlockKey]]:
    return [client.keys([number] * BLOCK_TOKENS * BLOCKS) for number in range(count)]


async def test_kill_of_a_node_loses_nothing_with_two_copies_and_the_next_kill_neither(processes: Processes) -> None:
    """The survivors make new copies, so that a second node may die later."""
    processes.membership.configure(lambda old: replace(old, copies=2, extent_tokens=64))
    ids = [f"{index:032x}" for index in range(4)]
    processes.start(*ids)
    async with await AsyncPoolClient.open(processes.url, NAMESPACE) as client:
        chains = chains_of(client, 25)
        await put(client, chains)
        for victim in ids[:2]:
            dead = processes.nodes.pop(victim)
            dead.kill()
            dead.stop()
            assert await got(client, chains) == 25 * BLOCKS
            processes.wait(lambda states: set(states) == set(processes.nodes))
            _repaired(processes, 2 * 25 * BLOCKS)
        assert await got(client, chains) == 25 * BLOCKS


async def test_kvpool_drain_empties_a_node_that_can_be_stopped_then(processes: Processes) -> None:
    """The operator's way, end to end: drain, stop, nothing is missed; a node that comes instead gets its share."""
    processes.membership.configure(lambda old: replace(old, extent_tokens=64))
    ids = [f"{index:032x}" for index in range(3)]
    processes.start(*ids)
    async with await AsyncPoolClient.open(processes.url, NAMESPACE) as client:
        chains = chains_of(client, 25)
        await put(client, chains)
        said = processes.kvpool("drain", ids[0], "--rate", "50MiB/s")
        assert said["done"]
        assert said["balance"]["blocks"] == said["balance"]["safe_blocks"] > 0
        states = {node["id"]: node["state"] for node in processes.kvpool("nodes")}
        assert states == {ids[0]: "draining", ids[1]: "active", ids[2]: "active"}
        assert await got(client, chains) == 25 * BLOCKS
        process = processes.nodes.pop(ids[0])
        assert process.stop() == 0, "".join(process.log)
        assert await got(client, chains) == 25 * BLOCKS
        processes.start("f" * 32)
        assert await got(client, chains) == 25 * BLOCKS
        assert _blocks(processes)["f" * 32] > 0
        processes.kvpool("drain", ids[1], "--deadline", "1ms", exit_code=2)
        assert processes.kvpool("drain", ids[1])["done"]


async def test_stopped_node_delays_nobody_for_long_and_goes_on_where_it_was(processes: Processes) -> None:
    """SIGSTOP: the lease runs out, the others take over; when it wakes up it is a member again and the pool is as it should be."""
    processes.membership.configure(lambda old: replace(old, copies=2, extent_tokens=64))
    ids = [f"{index:032x}" for index in range(3)]
    processes.start(*ids)
    async with await AsyncPoolClient.open(processes.url, NAMESPACE) as client:
        chains = chains_of(client, 15)
        await put(client, chains)
        processes.nodes[ids[1]].signal(signal.SIGSTOP)
        processes.wait(lambda states: set(states) == {ids[0], ids[2]})
        assert await got(client, chains) == 15 * BLOCKS
        processes.nodes[ids[1]].signal(signal.SIGCONT)
        processes.wait(lambda states: states == dict.fromkeys(ids, "active"))
        assert await got(client, chains) == 15 * BLOCKS
        _repaired(processes, 2 * 15 * BLOCKS)


def _repaired(processes: Processes, wanted: int) -> None:
    """Wait until the nodes hold at least `wanted` copies."""
    end = time.monotonic() + LIMIT_S
    while (total := sum(node["blocks"] for node in processes.kvpool("nodes"))) < wanted:
        assert time.monotonic() < end, f"{total} copies of {wanted}"


def _blocks(processes: Processes) -> dict[str, int]:
    return {node["id"]: node["blocks"] for node in processes.kvpool("nodes")}
