"""The key-level client against real node processes, over every reach."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import BlockKey, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.errors import ClosedError, ConfigError
from kvpool.request.pool import NodeDescription
from kvpool.testing.node_process import NodeProcess
from kvpool.tier import ArenaMapping
from kvpool.units import SECOND
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

Payload = npt.NDArray[np.uint8]
REACHES = ("shm", "ucx", "grpc")
TOKENS = list(range(16 * 20 + 5))


def soon(seconds: float = 10.0) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


def content(index: int, nbytes: int) -> Payload:
    return np.random.default_rng(index).integers(0, 256, nbytes, dtype=np.uint8)


def fill(index: int, payload: Payload) -> None:
    payload[:] = content(index, payload.nbytes)


class Sink:
    """Collects what is delivered and checks that it is right."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, index: int, payload: Payload) -> None:
        assert np.array_equal(payload, content(index, payload.nbytes))
        self.seen.append(index)


async def describe(node: NodeProcess) -> NodeDescription:
    rpc = PoolRpc(node.address)
    try:
        return await rpc.describe(5)
    finally:
        await rpc.close()


async def no_leases(node: NodeProcess) -> NodeDescription:
    """Wait until all leases have gone back; the books must balance at every look."""
    end = time.monotonic() + 20
    while True:
        books = await describe(node)
        assert books.free_bytes + books.used_bytes + books.pinned_bytes == books.capacity_bytes
        if books.read_leases == books.write_leases == books.pinned_bytes == 0:
            return books
        assert time.monotonic() < end, books
        await asyncio.sleep(0.02)


async def stored_again(pool: AsyncPoolClient, chain: list[BlockKey]) -> None:
    """Store the first 20 blocks, trying again until a node that has just come has been found."""
    end = time.monotonic() + 30
    while await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon(5)) < 20:
        assert time.monotonic() < end, "the new node is not found"
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("transport", REACHES)
async def test_store_then_load_returns_the_same_bytes(node: NodeProcess, namespace: Namespace, transport: str) -> None:
    """The main promise, over each reach, with a partial block at the end."""
    async with await AsyncPoolClient.open(node.address, namespace, transport=transport) as pool:
        chain = pool.keys(TOKENS, tail=True)
        counts = [16] * 20 + [5]
        assert await pool.lookup(chain) == 0
        assert await pool.store(chain, 0, counts, fill, deadline_ns=soon()) == 21
        assert await pool.lookup(chain) == 21
        sink = Sink()
        assert await pool.load(chain, 0, counts, sink, deadline_ns=soon()) == 21
        assert sink.seen == list(range(21))
        assert pool.reaches() == {node.node_id: transport}
    await no_leases(node)


async def test_auto_takes_shared_memory_on_the_same_host(node: NodeProcess, namespace: Namespace) -> None:
    """The best reach that works is chosen without being told."""
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        assert await pool.store(pool.keys(TOKENS), 0, [16] * 20, fill, deadline_ns=soon()) == 20
        assert pool.reaches() == {node.node_id: "shm"}


async def test_auto_falls_back_to_what_the_node_offers(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """A node that offers no mapping and no UCX is still reached."""
    node = start_node("--offer", "grpc")
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        assert await pool.store(pool.keys(TOKENS), 0, [16] * 20, fill, deadline_ns=soon()) == 20
        assert pool.reaches() == {node.node_id: "grpc"}


async def test_load_stops_at_the_first_hole(node: NodeProcess, namespace: Namespace) -> None:
    """Only a leading run is worth anything."""
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 3, fill, deadline_ns=soon()) == 3
        assert await pool.store(chain, 4, [16] * 16, fill, deadline_ns=soon()) == 16
        sink = Sink()
        assert await pool.load(chain, 0, [16] * 20, sink, deadline_ns=soon()) == 3
        assert sink.seen == [0, 1, 2]
        later = Sink()
        assert await pool.load(chain, 4, [16] * 16, later, deadline_ns=soon()) == 16
        assert later.seen == list(range(4, 20))
    await no_leases(node)


async def test_store_again_writes_nothing(node: NodeProcess, namespace: Namespace) -> None:
    """A block is a pure function of its key: what exists is not sent again."""
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon()) == 20

        def never(index: int, payload: Payload) -> None:
            raise AssertionError("asked for a block the pool holds")

        assert await pool.store(chain, 0, [16] * 20, never, deadline_ns=soon()) == 20


async def test_store_that_published_all_releases_nothing(node: NodeProcess, namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write lease ended with its last block; one that has blocks left goes back."""
    released: list[int] = []
    release = PoolRpc.release

    async def noted(self: PoolRpc, lease_id: int, suspect: Sequence[bytes], timeout_s: float) -> None:
        released.append(lease_id)
        await release(self, lease_id, suspect, timeout_s)

    monkeypatch.setattr(PoolRpc, "release", noted)
    async with await AsyncPoolClient.open(node.address, namespace, transport="grpc") as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 10, fill, deadline_ns=soon()) == 10

        def failing(index: int, payload: Payload) -> None:
            if index == 15:
                raise ValueError("no such block")
            fill(index, payload)

        with pytest.raises(ValueError, match="no such block"):
            await pool.store(chain, 0, [16] * 20, failing, deadline_ns=soon())
        await no_leases(node)
        assert len(released) == 1
    await no_leases(node)


async def test_damaged_block_is_a_miss_and_is_dropped(node: NodeProcess, namespace: Namespace) -> None:
    """A flipped bit in memory is never served to who checks every checksum, and the block can be stored anew."""
    async with await AsyncPoolClient.open(node.address, namespace, transport="shm", checksums="always") as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon()) == 20
        before = await describe(node)
        assert before.shm is not None
        rpc = PoolRpc(node.address, NodeIdentity(before.node_id, before.incarnation))
        lease_id, places = await rpc.acquire("test", 10_000, [chain[7]], 5)
        await rpc.release(lease_id, (), 5)
        await rpc.close()
        assert places[0] is not None
        offset, length = places[0]
        with ArenaMapping.open(before.shm.path, before.node_id, before.incarnation) as mapping:
            mapping.view(offset, length)[length - 9] ^= 1
        sink = Sink()
        assert await pool.load(chain, 0, [16] * 20, sink, deadline_ns=soon()) == 7
        assert sink.seen == list(range(7))
        books = await no_leases(node)
        assert books.counters["corrupt"] == before.counters["corrupt"] + 1
        assert await pool.lookup(chain) == 7
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon()) == 20
        assert await pool.load(chain, 0, [16] * 20, Sink(), deadline_ns=soon()) == 20


async def test_other_namespace_sees_nothing(node: NodeProcess, namespace: Namespace) -> None:
    """Equal tokens under another salt are other blocks."""
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        assert await pool.store(pool.keys(TOKENS), 0, [16] * 20, fill, deadline_ns=soon()) == 20
    async with await AsyncPoolClient.open(node.address, replace(namespace, salt=b"tenant")) as other:
        assert await other.lookup(other.keys(TOKENS)) == 0


async def test_full_pool_evicts_and_never_blocks(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """Many times the capacity can be stored; what is newest is there, and the books balance."""
    node = start_node()
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        for round_ in range(8):
            chain = pool.keys([round_, *range(16 * 512 - 1)])
            assert await pool.store(chain, 0, [16] * 512, fill, deadline_ns=soon()) == 512
            assert await pool.load(chain, 0, [16] * 512, Sink(), deadline_ns=soon()) == 512
    books = await no_leases(node)
    assert books.counters["evicted"] > 0
    assert books.used_bytes <= books.capacity_bytes


async def test_ttl_makes_a_block_leave(node: NodeProcess, namespace: Namespace) -> None:
    """Hand-off blocks don't linger."""
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        chain = pool.keys(TOKENS[:16])
        assert await pool.store(chain, 0, [16], fill, deadline_ns=soon(), ttl_ns=SECOND // 5) == 1
        assert await pool.lookup(chain) == 1
        end = time.monotonic() + 10
        while await pool.lookup(chain):
            assert time.monotonic() < end
            await asyncio.sleep(0.02)


async def test_passed_deadline_is_a_miss(node: NodeProcess, namespace: Namespace) -> None:
    """No time left means recompute, not an error."""
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon()) == 20
        past = time.monotonic_ns() - 1
        assert await pool.load(chain, 0, [16] * 20, Sink(), deadline_ns=past) == 0
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=past) == 0


@pytest.mark.parametrize("transport", REACHES)
async def test_dead_node_is_a_miss_and_a_new_one_is_found(
    start_node: Callable[..., NodeProcess], namespace: Namespace, transport: str
) -> None:
    """`kill -9` of a node: no exception, no hang; a restarted node at the same address serves without help."""
    node = start_node()
    async with await AsyncPoolClient.open(node.address, namespace, transport=transport) as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon()) == 20
        node.kill()
        assert await pool.load(chain, 0, [16] * 20, Sink(), deadline_ns=soon(5)) == 0
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon(5)) == 0
        assert await pool.lookup(chain) == 0
        again = start_node("--listen", node.address, "--id", node.node_id)
        await stored_again(pool, chain)
        assert await pool.load(chain, 0, [16] * 20, Sink(), deadline_ns=soon()) == 20
        await no_leases(again)


@pytest.mark.parametrize("transport", REACHES)
async def test_hung_node_costs_no_more_than_the_deadline(
    start_node: Callable[..., NodeProcess], namespace: Namespace, transport: str
) -> None:
    """SIGSTOP of a node: the load ends in a miss by its deadline; afterwards the node serves again. Its memory needs no node to be read."""
    node = start_node()
    async with await AsyncPoolClient.open(node.address, namespace, transport=transport) as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon()) == 20
        node.signal(signal.SIGSTOP)
        started = time.monotonic()
        assert await pool.load(chain, 0, [16] * 20, Sink(), deadline_ns=soon(0.5)) == (20 if transport == "shm" else 0)
        assert time.monotonic() - started < 10
        node.signal(signal.SIGCONT)
        end = time.monotonic() + 20
        while await pool.load(chain, 0, [16] * 20, Sink(), deadline_ns=soon()) < 20:
            assert time.monotonic() < end
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("transport", ["auto", "grpc"])
async def test_cancelled_store_gives_everything_back(node: NodeProcess, namespace: Namespace, transport: str) -> None:
    """A caller that goes away leaves no lease and no half-written block behind, and nothing is published once it has gone."""
    async with await AsyncPoolClient.open(node.address, namespace, transport=transport) as pool:
        assert await pool.connect() == []
        chain = pool.keys(list(range(16 * 512)))
        entered, cancelled, filled = threading.Event(), threading.Event(), list[int]()

        def slow(index: int, payload: Payload) -> None:
            entered.set()
            cancelled.wait(20)
            filled.append(index)
            fill(index, payload)

        work = asyncio.create_task(pool.store(chain, 0, [16] * 512, slow, deadline_ns=soon()))
        assert await asyncio.to_thread(entered.wait, 10)
        work.cancel()
        asyncio.get_running_loop().call_later(0.1, cancelled.set)
        with pytest.raises(asyncio.CancelledError):
            await work
        assert filled == [0] or transport == "grpc"  # there a window is filled as a whole
        await no_leases(node)
        assert await pool.lookup(chain) == 0


async def test_many_clients_at_once_get_the_right_bytes(node: NodeProcess, namespace: Namespace) -> None:
    """Concurrent stores and loads of overlapping chains never mix bytes up."""
    pools = [await AsyncPoolClient.open(node.address, namespace, transport=reach) for reach in (*REACHES, "auto")]
    try:
        chain = pools[0].keys(list(range(16 * 64)))

        async def work(pool: AsyncPoolClient) -> None:
            for _ in range(5):
                await pool.store(chain, 0, [16] * 64, fill, deadline_ns=soon())
                await pool.load(chain, 0, [16] * 64, Sink(), deadline_ns=soon())

        await asyncio.gather(*(work(pool) for pool in pools for _ in range(3)))
        assert await pools[0].load(chain, 0, [16] * 64, Sink(), deadline_ns=soon()) == 64
    finally:
        for pool in pools:
            await pool.close()
    await no_leases(node)


async def test_two_nodes_share_a_chain_and_one_dead_node_costs_its_share(
    start_node: Callable[..., NodeProcess], namespace: Namespace
) -> None:
    """Extents spread over nodes; what lives on the survivor is still found."""
    nodes = [start_node("--id", f"{i:032x}") for i in range(2)]
    source = ",".join(node.address for node in nodes)
    async with await AsyncPoolClient.open(source, namespace) as pool:
        chain = pool.keys(list(range(16 * 32 * 8)))
        counts = [16] * len(chain)
        assert await pool.store(chain, 0, counts, fill, deadline_ns=soon()) == len(chain)
        assert await pool.load(chain, 0, counts, Sink(), deadline_ns=soon()) == len(chain)
        assert all([(await describe(node)).blocks > 0 for node in nodes])
        nodes[1].kill()
        reached = await pool.load(chain, 0, counts, Sink(), deadline_ns=soon())
        assert reached < len(chain)
        assert reached % 32 == 0


@pytest.mark.parametrize("transport", REACHES)
async def test_stranger_at_a_known_address_is_not_written_to(
    start_node: Callable[..., NodeProcess], namespace: Namespace, transport: str
) -> None:
    """Another node at the address of a dead one: what a client knew of the old one means nothing to it, and it is told so."""
    node = start_node()
    async with await AsyncPoolClient.open(node.address, namespace, transport=transport) as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon()) == 20
        node.kill()
        stranger = start_node("--listen", node.address)
        await stored_again(pool, chain)
        assert await pool.load(chain, 0, [16] * 20, Sink(), deadline_ns=soon()) == 20
        assert pool.reaches() == {stranger.node_id: transport}
        assert (await no_leases(stranger)).counters["corrupt"] == 0


async def test_memory_of_a_dead_node_is_let_go_by_an_idle_client(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """A mapping keeps a dead node's memory alive: once another node has taken its place, nobody may hold on to it."""

    def mapped(node: NodeProcess) -> bool:
        return f"kvpool-{node.node_id}-" in Path("/proc/self/maps").read_text()

    node = start_node()
    async with await AsyncPoolClient.open(node.address, namespace, transport="shm") as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon()) == 20
        assert mapped(node)
        node.kill()
        start_node("--listen", node.address)
        await stored_again(pool, chain)
        end = time.monotonic() + 30
        while mapped(node):
            assert time.monotonic() < end, "the dead node's memory is still mapped"
            await asyncio.sleep(0.1)


async def test_eager_client_is_connected_before_it_is_asked(start_node: Callable[..., NodeProcess], namespace: Namespace) -> None:
    """A worker's first request must not pay for connecting, nor the first one after a node was replaced."""
    node = start_node()
    async with await AsyncPoolClient.open(node.address, namespace, eager=True) as pool:
        end = time.monotonic() + 30
        while pool.reaches() != {node.node_id: "shm"}:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        assert pool.reaches() == {}


async def test_no_node_at_all_is_a_miss(namespace: Namespace) -> None:
    """Nobody alive: everything is a miss, nothing raises."""
    async with await AsyncPoolClient.open("127.0.0.1:9", namespace) as pool:
        chain = pool.keys(TOKENS)
        assert await pool.lookup(chain) == 0
        assert await pool.load(chain, 0, [16] * 20, Sink(), deadline_ns=soon(2)) == 0
        assert await pool.store(chain, 0, [16] * 20, fill, deadline_ns=soon(2)) == 0


async def test_closed_client_refuses(node: NodeProcess, namespace: Namespace) -> None:
    """Use after close is the caller's mistake."""
    pool = await AsyncPoolClient.open(node.address, namespace)
    await pool.close()
    await pool.close()
    with pytest.raises(ClosedError):
        await pool.lookup(pool.keys(TOKENS))


async def test_bad_transport_and_bad_source_say_what_to_do(node: NodeProcess, namespace: Namespace) -> None:
    """Mistakes in configuration are caught at the edge."""
    with pytest.raises(ConfigError, match="choose auto, shm, ucx, tcp, grpc"):
        await AsyncPoolClient.open(node.address, namespace, transport="rdma")
    with pytest.raises(ConfigError, match="host:port"):
        await AsyncPoolClient.open("nowhere", namespace)
