"""The TCP data plane of real nodes: blocks by key, what a death of either process means, and who is let in."""

import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import BlockKey, Geometry, LayerSpec, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.client.choose import open_reach
from kvpool.errors import ConfigError, KvpoolError, UnavailableError
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.request.pool import NodeDescription, TcpOffer
from kvpool.security.tokens import TokenTable, new_token, revoke
from kvpool.testing.certificates import Authority
from kvpool.testing.node_process import NodeProcess, poll
from kvpool.transport import Reach, Run
from kvpool.transport.tcp import Peer, TcpReach
from kvpool.units import MIB, SECOND
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.guard import Guard
from kvpool.wire.pool_client import PoolRpc

Payload = npt.NDArray[np.uint8]
GEOMETRY = Geometry(tuple(LayerSpec("full", 2, 16, 16) for _ in range(2)), 16, "float32")
NAMESPACE = Namespace(model="tcp", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
COUNTS = [16] * 20
TOKENS = list(range(16 * 20))


def soon(seconds: float = 30.0) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


def fill(index: int, payload: Payload) -> None:
    payload[:] = index + 1


def check(index: int, payload: Payload) -> None:
    assert (payload == index + 1).all()


async def describe(address: str, security: Security = PLAIN) -> NodeDescription:
    rpc = PoolRpc(address, security=security)
    try:
        return await rpc.describe(10)
    finally:
        await rpc.close()


def children(pid: int) -> list[int]:
    """Of a process, that run the data plane."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    found += [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return sorted({child for child in found if b"kvpool.node.tcp" in Path(f"/proc/{child}/cmdline").read_bytes()})


@dataclass
class Stored:
    """A node with 20 blocks on it."""

    process: NodeProcess
    chain: list[BlockKey]
    frame_bytes: int

    async def reach(self) -> TcpReach:
        """To its data plane."""
        said = await describe(self.process.address)
        assert said.tcp is not None
        return TcpReach(Peer(address=said.tcp.address, node_id=said.node_id, incarnation=said.incarnation))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    started: list[NodeProcess] = []

    def make(*flags: str) -> NodeProcess:
        started.append(NodeProcess("--capacity", "64MiB", *flags, arena_dir=tmp_path))
        return started[-1]

    yield make
    for process in started:
        process.stop()


@pytest.fixture
async def stored(start: Callable[..., NodeProcess]) -> Stored:
    process = start("--offer", "tcp,grpc")
    async with await AsyncPoolClient.open(process.address, NAMESPACE, transport="tcp") as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == 20
        assert pool.reaches() == {process.node_id: "tcp"}
    description = await describe(process.address)
    return Stored(process, chain, description.used_bytes // 20)


def wanted(stored: Stored, into: Payload) -> list[tuple[BlockKey, int, Payload, Payload]]:
    """All 20 frames, side by side in `into`; frames here have no odd bytes, so lengths are those of the ranges."""
    length, empty = stored.frame_bytes, np.zeros(0, np.uint8)
    return [(key, length, empty, into[index * length : (index + 1) * length]) for index, key in enumerate(stored.chain)]


async def test_client_reads_what_another_wrote_through_the_plane(stored: Stored) -> None:
    """Leased runs and frames by key are the same bytes."""
    reach = await stored.reach()
    assert reach.probe([*stored.chain, BlockKey(bytes(32))], soon()) == b"\1" * 20 + b"\0"
    into = np.zeros(20 * stored.frame_bytes, np.uint8)
    assert all(reach.get(wanted(stored, into), soon()))
    assert all((frame[-8192:] == index + 1).all() for index, frame in enumerate(into.reshape(20, -1)))
    async with await AsyncPoolClient.open(stored.process.address, NAMESPACE) as pool:
        assert await pool.load(stored.chain, 0, COUNTS, check, deadline_ns=soon()) == 20
        assert pool.reaches() == {stored.process.node_id: "tcp"}
    reach.close()


async def test_killed_plane_comes_back_and_clients_go_another_way_meanwhile(stored: Stored) -> None:
    """`kill -9` of the child is no failure of the node."""
    (child,) = children(stored.process.process.pid)
    async with await AsyncPoolClient.open(stored.process.address, NAMESPACE) as pool:
        assert await pool.load(stored.chain, 0, COUNTS, check, deadline_ns=soon()) == 20
        old = await stored.reach()
        os.kill(child, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            old.probe(stored.chain, soon())
        old.close()
        end = time.monotonic() + 30
        while await pool.load(stored.chain, 0, COUNTS, check, deadline_ns=soon(5)) < 20:
            assert time.monotonic() < end, "no way to the blocks"
        assert set(pool.reaches().values()) <= {"grpc", "tcp"}
    poll(lambda: children(stored.process.process.pid) not in ([], [child]), "another child runs")
    while (await describe(stored.process.address)).tcp is None:
        assert time.monotonic() < end, "the data plane is not offered again"
    again = await stored.reach()
    assert again.probe(stored.chain, soon()) == b"\1" * 20
    again.close()


async def test_killed_node_ends_reads_that_are_under_way(stored: Stored) -> None:
    """They end because it is gone, not because their time is up, and no process stays behind."""
    (child,) = children(stored.process.process.pid)
    reach, into, errors = await stored.reach(), np.zeros(20 * stored.frame_bytes, np.uint8), []
    reading = threading.Event()

    def read() -> None:
        try:
            while True:
                reach.get(wanted(stored, into), soon(60))
                reading.set()
        except KvpoolError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(30)
    stored.process.kill()
    thread.join(30)
    assert [type(error) for error in errors] == [UnavailableError]
    poll(lambda: not Path(f"/proc/{child}").exists(), "the child has ended")
    reach.close()


async def test_restarted_node_is_not_mistaken_for_the_old_one(stored: Stored, start: Callable[..., NodeProcess]) -> None:
    """Another life listens at the same port: offsets and keys of before mean nothing there."""
    said = await describe(stored.process.address)
    assert said.tcp is not None
    assert stored.process.stop() == 0
    again = start("--offer", "tcp,grpc", "--id", said.node_id, "--tcp-listen", said.tcp.address)
    now = await describe(again.address)
    assert now.tcp == said.tcp
    with pytest.raises(UnavailableError, match="not the one"):
        TcpReach(Peer(address=said.tcp.address, node_id=said.node_id, incarnation=said.incarnation))
    TcpReach(Peer(address=said.tcp.address, node_id=said.node_id, incarnation=now.incarnation)).close()


async def test_plane_that_cannot_listen_is_an_error_if_it_was_named(start: Callable[..., NodeProcess]) -> None:
    """Otherwise the node does without, and says so."""
    with pytest.raises(AssertionError, match="leave tcp out of the offers"):
        start("--offer", "tcp,grpc", "--tcp-listen", "127.0.0.1:1x")
    node = start("--tcp-listen", "256.0.0.1:0")
    assert (await describe(node.address)).tcp is None
    assert any("not offering TCP" in line for line in node.log)


@dataclass
class Site:
    """A node that asks for tokens, over TLS."""

    node: PoolNode
    directory: Path
    authority: Authority

    def security(self, name: str, *rights: str) -> Security:
        """Of somebody with a new token."""
        token = new_token(self.directory / "tokens", name=name, tenant=None, rights=rights, now_s=0)[1]
        (self.directory / name).write_text(token)
        return self.authority.client(self.directory / name)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    authority = Authority(tmp_path)
    new_token(tmp_path / "tokens", name="first", tenant=None, rights=["read"], now_s=0)
    guard = Guard(security=authority.server(), tokens=TokenTable(tmp_path / "tokens"))
    node = PoolNode(NodeConfig(capacity_bytes=4 * MIB, offers=("tcp", "grpc"), arena_directory=tmp_path, guard=guard))
    await node.start()
    yield Site(node, tmp_path, authority)
    await node.stop()


async def test_plane_has_tls_and_asks_for_the_right_to_map(site: Site) -> None:
    """As the control plane, which offers it to nobody else; who knows the address gains nothing by it."""
    worker, reader = site.security("w", "map", "read", "write"), site.security("r", "read")
    offered = await describe(site.node.address, worker)
    assert (await describe(site.node.address, reader)).tcp is None
    assert offered.tcp is not None
    into = np.zeros(8, np.uint8)
    reach = open_reach(offered, site.node.address, "tcp", security=worker)
    reach.read([Run(0, 8, 0)], into, lease_id=0, deadline_ns=soon())
    for who, why in ((reader, "map or worker"), (site.authority.client(), "not known"), (PLAIN, "tcp:")):
        with pytest.raises(UnavailableError, match=why):
            open_reach(offered, site.node.address, "tcp", security=who)
    elsewhere = replace(offered, tcp=TcpOffer(address="10.1.2.3:4"))
    with pytest.raises(UnavailableError, match="in the clear"):
        open_reach(elsewhere, "10.1.2.3:5", "tcp", security=Security(token_file=worker.token_file))
    revoke(site.directory / "tokens", "w")
    poll(lambda: not reads(reach, into), "the token counts no more")
    reach.close()


def reads(reach: Reach, into: Payload) -> bool:
    try:
        reach.read([Run(0, 8, 0)], into, lease_id=0, deadline_ns=soon())
    except KvpoolError:
        return False
    return True


async def test_tokens_are_not_taken_in_the_clear_from_a_network(tmp_path: Path) -> None:
    """Not by a data plane either, wherever the control plane listens."""
    new_token(tmp_path / "tokens", name="first", tenant=None, rights=["read"], now_s=0)
    guard = Guard(tokens=TokenTable(tmp_path / "tokens"))
    node = PoolNode(NodeConfig(capacity_bytes=MIB, arena_directory=tmp_path, tcp_listen="0.0.0.0:0", offers=("tcp", "grpc"), guard=guard))
    with pytest.raises(ConfigError, match="in the clear"):
        await node.start()
    await node.stop()
