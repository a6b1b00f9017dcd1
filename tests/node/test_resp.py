"""The RESP door of real nodes: values by name through the client library of Redis, tiers, evictions, and what is refused."""

import asyncio
import os
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
import redis.asyncio
from redis.exceptions import ResponseError

from kvpool.errors import ConfigError
from kvpool.node.opening import TierConfig
from kvpool.node.resp.frames import PARENT, frame_bytes, key_of, read, write
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.testing.node_process import NodeProcess
from kvpool.units import MIB
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.fence import NodeIdentity

from .cluster_rig import Cluster
from .conftest import until

BENCHMARK = "redis-benchmark"
KEY = "meta-llama/Llama-3-8B@00010000@0@9f86d081884c7d65"
Nodes = Callable[..., Awaitable[PoolNode]]


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    """Starts nodes with a door; each one's books must balance in the end."""
    started: list[PoolNode] = []

    async def one(mib: int = 16, **more: Any) -> PoolNode:
        config = NodeConfig(capacity_bytes=mib * MIB, offers=("shm",), arena_directory=tmp_path, resp_port=0, **more)
        node = PoolNode(config)
        started.append(node)
        await node.start()
        return node

    yield one
    for node in started:
        if node.pool is not None:
            node.pool.check()
        await node.stop()


def client(node: PoolNode, **more: Any) -> Any:
    """A client of the node's door; use it `async with`."""
    assert node.door is not None
    host, _, port = node.door.address.rpartition(":")
    return redis.asyncio.Redis(host=host, port=int(port), single_connection_client=True, **more)


async def raw(node: PoolNode) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    assert node.door is not None
    host, _, port = node.door.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize("protocol", [2, 3])
async def test_values_come_back_as_they_were_put(nodes: Nodes, protocol: int) -> None:
    """What LMCache's adapter does (SET, GET, EXISTS), and the batches of others, in both versions of the protocol."""
    values = {f"{KEY}{n:x}".encode(): os.urandom(n) for n in (0, 1, 55, 56, 57, 4096, MIB - 8, MIB - 7, MIB, 3 * MIB + 1)}
    values[b"\0\r\n\xff"] = b"$5\r\nhello\r\n"
    async with client(await nodes(), protocol=protocol) as one:
        assert await one.ping()
        for name, value in values.items():
            assert await one.set(name, value)
        assert [await one.get(name) for name in values] == list(values.values())
        assert await one.mget("none", *values, "none") == [None, *values.values(), None]
        assert await one.exists(*values, "none", KEY + "1", KEY + "1") == len(values) + 2
        assert await one.get("none") is None
        assert await one.delete("none", *values) == len(values)
        assert await one.mget(*values) == [None] * len(values)


async def test_value_is_replaced_as_a_whole(nodes: Nodes) -> None:
    """The last one counts, whatever its length; of writers at once one wins, and no reader sees a mixture."""
    node = await nodes(64)
    async with client(node) as one, client(node) as other, client(node) as reader:
        for size in (10, 2 * MIB, 0, 3000):
            await one.set("k", bytes([size % 251]) * size)
            assert await one.get("k") == bytes([size % 251]) * size
        writes = asyncio.gather(*(who.set("k", bytes([n]) * 2 * MIB) for n, who in ((1, one), (2, other)) for _ in range(10)))
        while not writes.done():
            seen = await reader.get("k")
            assert seen is None or (len(seen) in (3000, 2 * MIB) and len(set(seen)) == 1)
        assert all(await writes)
        assert set(await reader.get("k")) in ({1}, {2})


async def test_only_new_values_and_values_for_a_while(nodes: Nodes) -> None:
    """NX leaves what is there; EX and PX end a value."""
    async with client(await nodes()) as one:
        assert await one.set("k", b"1", nx=True)
        assert await one.set("k", b"2", nx=True) is None
        assert await one.get("k") == b"1"
        assert await one.set("k", b"3", ex=1000, nx=True) is None
        assert await one.set("gone", b"4", px=1)
        async with asyncio.timeout(30):
            while await one.exists("gone"):  # noqa: ASYNC110 - a server has no event
                await asyncio.sleep(0.01)
        assert await one.get("gone") is None
        assert await one.set("gone", b"5", ex=1000)
        assert await one.get("gone") == b"5"


async def test_full_node_forgets_the_oldest_and_refuses_what_never_fits(nodes: Nodes) -> None:
    """An evicted value is nil, never an error; a value larger than the node is one."""
    async with client(await nodes(4)) as one:
        for n in range(40):
            assert await one.set(f"k{n}", bytes([n]) * (MIB // 4))
        assert await one.get("k0") is None
        assert await one.get("k39") == bytes([39]) * (MIB // 4)
        with pytest.raises(ResponseError, match="no room"):
            await one.set("large", bytes(5 * MIB))
        assert await one.ping()


async def test_damaged_value_is_a_miss_and_goes(nodes: Nodes) -> None:
    """A wrong byte is never returned."""
    node = await nodes()
    assert node.pool is not None
    assert node.arena is not None
    async with client(node) as one:
        await one.set("k", bytes(1000))
        place = node.pool.locate(key_of(b"k", b""))
        assert place is not None
        node.arena.view(place.offset, place.length)[700] ^= 1
        assert await one.get("k") is None
        assert await one.exists("k") == 0
        assert (await one.info())["corrupt"] == 1


async def test_values_go_down_to_disk_and_come_back(nodes: Nodes, tmp_path: Path) -> None:
    """A value is a block like any other; one that was replaced or removed doesn't come back from below."""
    node = await nodes(4, tiers=TierConfig(ssd=tmp_path / "ssd", ssd_bytes=128 * MIB))
    async with client(node) as one:
        for n in range(40):
            assert await one.set(f"k{n}", bytes([n]) * (MIB // 4))
        for n in range(0, 40, 2):
            assert await one.set(f"k{n}", bytes([100 + n]) * 1000)
        assert await one.delete("k1", "k3") == 2
        assert [await one.get(f"k{n}") for n in range(0, 40, 2)] == [bytes([100 + n]) * 1000 for n in range(0, 40, 2)]
        assert await one.mget("k1", "k3", "k5", "k39") == [None, None, bytes([5]) * (MIB // 4), bytes([39]) * (MIB // 4)]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(tmp_path)
    await made.open(0)
    yield made
    await made.close()


async def test_values_stay_on_the_node_they_were_written_to(cluster: Cluster) -> None:
    """Nobody can say which node of a cluster they belong to: the balancer neither moves them nor waits for them."""
    first = await cluster.node("a" * 32, resp_port=0)
    names = [f"k{n}" for n in range(50)]
    async with client(first) as one:
        for name in names:
            await one.set(name, name)
        second = await cluster.node("b" * 32, resp_port=0)
        await cluster.settled()
        async with client(second) as other:
            assert await other.exists(*names) == 0
        assert await one.exists(*names) == 50
        assert cluster.side(first).balancer.report().counters["adrift"] == 50


async def test_pinned_value_stays(nodes: Nodes) -> None:
    """An operator's hard pin is stronger than a client; both ways to lose a value say so."""
    node = await nodes()
    assert node.pool is not None
    async with client(node) as one:
        await one.set("k", b"1")
        node.pool.pin([key_of(b"k", b"")], owner="ops", hard=True, duration_ns=10**12, now_ns=0)
        with pytest.raises(ResponseError, match="pinned"):
            await one.set("k", b"2")
        with pytest.raises(ResponseError, match="pinned"):
            await one.delete("k")
        assert await one.get("k") == b"1"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("GET", "wrong number of arguments for GET"),
        ("GET a b", "wrong number of arguments for GET"),
        ("SET a", "wrong number of arguments for SET"),
        ("SET a b XX", "not 'XX'"),
        ("SET a b KEEPTTL", "SET takes"),
        ("SET a b EX", "SET takes"),
        ("SET a b EX 0", "invalid expire time"),
        ("SET a b EX -1", "invalid expire time"),
        ("SET a b PX 1.5", "invalid expire time"),
        ("SET a b EX 99999999999999999999", "invalid expire time"),
        ("SET a b EX 1 PX 1", "SET takes"),
        ("MGET", "wrong number"),
        ("EXISTS", "wrong number"),
        ("DEL", "wrong number"),
        ("GET " + "k" * 1025, "at most 1024 bytes"),
        ("INCR a", "unknown command 'INCR'; this server has AUTH"),
        ("SUBSCRIBE a", "unknown command"),
        ("SELECT 1", "one database"),
        ("CONFIG SET save x", "only GET"),
        ("CLIENT KILL x", "CLIENT has SETINFO"),
        ("HELLO 4", "NOPROTO"),
        ("HELLO 2 NONSENSE", "HELLO takes"),
        ("AUTH x", "asks nobody"),
    ],
)
async def test_what_is_not_done_is_refused_and_the_connection_goes_on(nodes: Nodes, command: str, why: str) -> None:
    """An option passed over would be a promise broken: SET with an option that isn't known sets nothing."""
    reader, writer = await raw(await nodes())
    writer.write(f"{command}\r\nEXISTS a\r\nPING\r\n".encode())
    answer = await reader.readline()
    assert answer.startswith(b"-")
    assert why in answer.decode()
    assert await reader.readline() == b":0\r\n"
    assert await reader.readline() == b"+PONG\r\n"
    writer.close()


async def test_clients_are_told_what_they_ask_when_they_connect(nodes: Nodes) -> None:
    """`redis-cli`, `redis-benchmark` and client libraries ask these first."""
    reader, writer = await raw(await nodes())
    writer.write(b"COMMAND DOCS\r\nCONFIG GET save\r\nCONFIG GET maxmemory\r\nCLIENT SETINFO lib-name x\r\nSELECT 0\r\nPING hi\r\nQUIT\r\n")
    assert await reader.read() == b"*0\r\n*2\r\n$4\r\nsave\r\n$0\r\n\r\n*0\r\n+OK\r\n+OK\r\n$2\r\nhi\r\n+OK\r\n"
    writer.close()


async def test_operators_see_values_as_sound_blocks(nodes: Nodes) -> None:
    """`kvpool verify`, `inspect` and `gc` know nothing of doors: a value is whole, and no orphan for want of its parent."""
    node = await nodes()
    async with client(node) as one:
        await one.set("k", b"v" * 1000, ex=1000)
        rpc = AdminRpc(node.address, NodeIdentity(node.node_id, node.incarnation))
        (seen,) = await rpc.inspect([key_of(b"k", b"")], 10)
        assert seen.size >= 1000
        assert seen.ttl_left_ms is not None
        assert (await rpc.gc(10, dry_run=True)).orphan_blocks == 0
        seen_whole = await rpc.verify("dram", 10)
        assert (seen_whole.checked, seen_whole.corrupt_count) == (1, 0)
        await rpc.close()


async def test_page_in_a_browser_gets_no_further_than_its_first_line(nodes: Nodes) -> None:
    """HTTP's body would be commands."""
    node = await nodes()
    reader, writer = await raw(node)
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n\r\nSET a b\r\n")
    answer = await reader.read()
    assert answer.startswith(b"-ERR unknown command 'POST'")
    assert answer.count(b"\r\n") == 1
    writer.close()
    async with client(node) as one:
        assert await one.exists("a") == 0


def test_keys_and_frames_are_what_they_were() -> None:
    """Values outlive a version on disk: names give the same keys, and tenants' names others; a frame opens as its own value only."""
    assert key_of(b"a", b"").hex() == GOLDEN_KEY
    assert len({key_of(b"a", b""), key_of(b"a", b"salt"), key_of(b"b", b""), PARENT}) == 4
    for size in (0, 1, 56, 57, MIB, MIB + 1):
        frame = np.zeros(frame_bytes(size), np.uint8)
        write(frame, key_of(b"a", b""), b"v" * size)
        assert read(frame, key_of(b"a", b"")) == b"v" * size
        assert frame_bytes(size) - size < 64 * 512 + 264


GOLDEN_KEY = "47731c6e44a3e1f0b82c8c0766550cf0e5a5418ea8f6d0e1b77fcb8bdb776248"


async def test_port_in_use_is_an_error_that_names_the_flag(nodes: Nodes) -> None:
    """A node that was asked for a door doesn't start without one."""
    node = await nodes()
    assert node.door is not None
    taken = int(node.door.address.rpartition(":")[2])
    config = replace(node_config(node), resp_port=taken)
    second = PoolNode(config)
    with pytest.raises(ConfigError, match="--resp-port"):
        await second.start()
    await second.stop()


def node_config(node: PoolNode) -> NodeConfig:
    assert node.arena is not None
    return NodeConfig(capacity_bytes=MIB, offers=("shm",), arena_directory=node.arena.path.parent)


@pytest.fixture
def process(tmp_path: Path) -> Any:
    node = NodeProcess("--capacity", "64MiB", "--offer", "grpc", "--resp-port", "0", arena_dir=tmp_path)
    yield node
    assert node.stop() == 0


def test_node_process_says_where_its_door_is(process: NodeProcess) -> None:
    """The flag; and whoever is connected doesn't keep the node from stopping."""
    (port,) = [found[1] for line in process.log if (found := re.search(r"clients of Redis in at \S+:(\d+)", line))]
    one = redis.Redis(port=int(port))
    assert one.set(KEY, b"v")
    assert one.get(KEY) == b"v"


@pytest.mark.skipif(not shutil.which(BENCHMARK), reason="redis-benchmark (Debian's redis-tools) is not installed")
def test_redis_benchmark_runs(process: NodeProcess) -> None:
    """A client that nobody here wrote: pipelines, random keys, no failed answer."""
    (port,) = [found[1] for line in process.log if (found := re.search(r"clients of Redis in at \S+:(\d+)", line))]
    command = [BENCHMARK, "-p", port, "-t", "ping,set,get", "-n", "500", "-c", "8", "-P", "4", "-d", "2000", "-r", "50", "-q", "-e"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert "GET" in done.stdout
    assert "Error from server" not in done.stdout + done.stderr


async def test_answers_wait_for_no_acknowledgement(nodes: Nodes) -> None:
    """Without TCP_NODELAY the last bytes of a value come 40 ms after the others, once the client's system acknowledges these."""
    node = await nodes()
    async with client(node) as one:
        await one.ping()
        assert node.door is not None
        (transport,) = node.door._open.values()
        assert transport is not None
        assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_node_stops_under_its_clients(nodes: Nodes) -> None:
    """A client that waits or is in the middle of a command is cut."""
    node = await nodes()
    reader, writer = await raw(node)
    writer.write(b"*2\r\n$3\r\nGET")
    door = node.door
    assert door is not None
    await until(lambda: door.counters["resp_connections"] == 1)
    await node.stop()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    writer.close()
