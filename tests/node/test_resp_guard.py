"""Who gets through the RESP door and how much of it: TLS, tokens, tenants, rates, and every limit and deadline."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, RedisError, ResponseError

from kvpool.errors import ConfigError, LimitError
from kvpool.node.resp.budget import Budget
from kvpool.node.resp.connection import Waits
from kvpool.node.resp.server import RespLimits
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.security.salt import Salts
from kvpool.security.tenants import TenantBook
from kvpool.security.tokens import TokenTable, new_token, revoke
from kvpool.testing.certificates import Authority
from kvpool.units import KIB, MIB
from kvpool.wire.credentials import PLAIN
from kvpool.wire.guard import OPEN, Guard

from .conftest import until

BENCHMARK = "redis-benchmark"
SHORT_S = 0.2
"""A deadline that is to pass; all others are left as long as they are, so that a slow machine fails no test."""
Start = Callable[..., Awaitable["Site"]]


@dataclass
class Site:
    """A node with a door, and what it takes to come in."""

    node: PoolNode
    directory: Path
    authority: Authority
    tls: bool

    @property
    def door(self) -> Any:
        """The door."""
        return self.node.door

    @property
    def port(self) -> int:
        """Where it is."""
        return int(self.door.address.rpartition(":")[2])

    def token(self, name: str, *rights: str, tenant: str | None = None) -> str:
        """A new token."""
        return new_token(self.directory / "tokens", name=name, tenant=tenant, rights=rights or ("read", "write"), now_s=0)[1]

    def client(self, token: str | None = None, **more: Any) -> Any:
        """Of the door; use it `async with`."""
        if self.tls:
            more = {"ssl": True, "ssl_ca_certs": str(self.authority.cert), **more}
        return redis.asyncio.Redis(
            host="127.0.0.1", port=self.port, password=token, single_connection_client=True, retry=Retry(NoBackoff(), 0), **more
        )

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection as it is."""
        context = ssl.create_default_context(cafile=str(self.authority.cert)) if self.tls else None
        return await asyncio.open_connection("127.0.0.1", self.port, ssl=context)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    authority = Authority(tmp_path)
    sites: list[Site] = []

    async def one(*, tls: bool = False, tokens: bool = False, mib: int = 16, **limits: Any) -> Site:
        guard = OPEN
        if tls or tokens:
            if not (tmp_path / "tokens").exists():
                new_token(tmp_path / "tokens", name="first", tenant=None, rights=["read"], now_s=0)
            (tmp_path / "secret").write_bytes(b"s" * 32)
            guard = Guard(
                security=authority.server() if tls else PLAIN,
                tokens=TokenTable(tmp_path / "tokens"),
                salts=Salts(tmp_path / "secret"),
                book=TenantBook(tmp_path / "book"),
            )
        config = NodeConfig(
            capacity_bytes=mib * MIB,
            offers=("grpc",),
            arena_directory=tmp_path,
            resp_port=0,
            resp_limits=RespLimits(**limits),
            guard=guard,
        )
        site = Site(PoolNode(config), tmp_path, authority, tls)
        sites.append(site)
        await site.node.start()
        return site

    yield one
    for site in sites:
        if site.node.pool is not None:
            site.node.pool.check()
        await site.node.stop()


async def refused(client: Any, error: type[Exception]) -> None:
    """It doesn't get in."""
    with pytest.raises(error):
        await client.ping()
    await client.aclose()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_nothing_before_a_token_over_tls(start: Start, protocol: int) -> None:
    """Not even PING, by AUTH or HELLO; a wrong token and another's name are refused alike; a right one opens the door."""
    site = await start(tls=True, tokens=True)
    token = site.token("alice")
    async with site.client(token, protocol=protocol) as one, site.client(token, username="alice", protocol=protocol) as named:
        assert await one.set("k", b"v" * 2 * MIB)
        assert await named.get("k") == b"v" * 2 * MIB
        assert await named.mget("k", "none") == [b"v" * 2 * MIB, None]
        assert (await one.ping(), await one.exists("k", "none"), await one.delete("k"), await one.exists("k")) == (True, 1, 1, 0)
        assert (await one.info())["server_name"] == "kvpool"
    for bad in ({"token": "kvp_wrong"}, {"token": token, "username": "bob"}):
        await refused(site.client(protocol=protocol, **bad), AuthenticationError)
    reader, writer = await site.raw()
    writer.write(b"PING\r\nGET k\r\nSET k x\r\nINFO\r\nHELLO\r\nAUTH a b c\r\nQUIT\r\n")
    answers = (await reader.read()).decode().split("\r\n")
    assert [answer.split()[0] for answer in answers[:-1]] == ["-NOAUTH"] * 5 + ["-ERR", "+OK"]
    writer.close()


@pytest.mark.skipif(not shutil.which(BENCHMARK), reason="redis-benchmark (Debian's redis-tools) is not installed")
async def test_redis_benchmark_runs_over_tls_with_a_token(start: Start) -> None:
    """A client that nobody here wrote, through all that guards the door."""
    site = await start(tls=True, tokens=True)
    argv = [BENCHMARK, "-p", str(site.port), "--tls", "--cacert", str(site.authority.cert), "--user", "default", "-a", site.token("alice")]
    argv += ["-t", "set,get", "-n", "200", "-c", "4", "-P", "4", "-d", "2000", "-r", "20", "-q", "-e"]
    done = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    said = (await asyncio.wait_for(done.communicate(), 60))[0].decode()
    assert done.returncode == 0, said
    assert "GET" in said
    assert "Error from server" not in said
    assert site.door.counters["resp_commands"] >= 400


async def test_door_speaks_tls_only_where_the_node_does(start: Start) -> None:
    """A client without it, or with another authority, gets nowhere, and the door goes on."""
    site = await start(tls=True, tokens=True)
    token = site.token("alice")
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(f"AUTH {token}\r\n".encode())
    assert b"OK" not in await reader.read()
    writer.close()
    (site.directory / "other").mkdir()
    await refused(site.client(token, ssl_ca_certs=str(Authority(site.directory / "other").cert)), RedisError)
    async with site.client(token) as one:
        assert await one.ping()


async def test_tenants_have_keys_of_their_own(start: Start) -> None:
    """The same name is another value, what a tenant removes is its own, and no books are shown."""
    site = await start(tokens=True)
    a, b, worker = site.token("alice", tenant="a"), site.token("bob", tenant="b"), site.token("w", "worker")
    async with site.client(a) as alice, site.client(b) as bob, site.client(worker) as nobody:
        await alice.set("k", b"alice's")
        assert await bob.get("k") is None
        assert await nobody.get("k") is None
        await bob.set("k", b"bob's")
        assert await bob.delete("k") == 1
        assert await alice.mget("k") == [b"alice's"]
        assert "used_memory" not in await alice.info()
        assert "used_memory" in await nobody.info()
        assert site.node.pool is not None
        assert site.node.pool.quotas()["a"].used_bytes > 0


async def test_rights_quota_and_rate_bind_as_elsewhere(start: Start) -> None:
    """A reader can't write; a tenant at its quota finds no room for more than it, above its rate it waits."""
    site = await start(tokens=True)
    reader, writer, tenant = site.token("r", "read"), site.token("w", "write"), site.token("t", tenant="t")
    assert site.node.pool is not None
    site.node.pool.set_quota("t", MIB)
    async with site.client(reader) as one:
        assert await one.get("k") is None
        with pytest.raises(NoPermissionError, match="write"):
            await one.set("k", b"v")
    async with site.client(writer) as one:
        await one.set("k", b"v")
        with pytest.raises(NoPermissionError, match="read"):
            await one.get("k")
    async with site.client(tenant) as one:
        with pytest.raises(ResponseError, match="quota"):
            await one.set("large", bytes(2 * MIB))
        await one.set("k", b"v")
        TenantBook(site.directory / "book").change("t", requests_per_s=0.001)
        await one.get("k")
        with pytest.raises((ResponseError, BusyLoadingError), match="above its rate"):
            await one.get("k")
        assert await one.ping()


async def test_revoked_token_counts_no_more(start: Start) -> None:
    """At the next command of a connection that is open."""
    site = await start(tokens=True)
    token = site.token("alice")
    reader, writer = await site.raw()
    writer.write(f"AUTH {token}\r\nPING\r\n".encode())
    assert await reader.readexactly(12) == b"+OK\r\n+PONG\r\n"
    revoke(site.directory / "tokens", "alice")
    writer.write(b"PING\r\n")
    assert (await reader.readline()).startswith(b"-NOAUTH")
    writer.close()


async def test_tokens_are_not_taken_in_the_clear_from_a_network(tmp_path: Path) -> None:
    """As by the control plane, on whose host the door is."""
    new_token(tmp_path / "tokens", name="first", tenant=None, rights=["read"], now_s=0)
    guard = Guard(tokens=TokenTable(tmp_path / "tokens"))
    config = NodeConfig(capacity_bytes=MIB, arena_directory=tmp_path, listen="0.0.0.0:0", offers=("grpc",), resp_port=0, guard=guard)
    node = PoolNode(config)
    with pytest.raises(ConfigError, match="in the clear"):
        await node.start()
    await node.stop()


async def test_strangers_have_little_room_and_little_time(start: Start) -> None:
    """Before AUTH a command is small, and comes soon, or the connection ends."""
    site = await start(tokens=True)
    reader, writer = await site.raw()
    writer.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2000\r\n")
    assert b"bulk length" in await reader.read()
    writer.close()
    site = await start(tokens=True, waits=Waits(stranger_s=SHORT_S))
    reader, writer = await site.raw()
    assert await reader.read() == b""
    writer.close()
    assert site.door.counters["resp_cut"] == 1


async def test_half_a_command_is_not_waited_for_for_ever(start: Start) -> None:
    """However slowly it goes on; what was set aside for it is given back."""
    site = await start(waits=Waits(command_s=SHORT_S))
    reader, writer = await site.raw()
    writer.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n")
    await until(lambda: site.door.in_hand_bytes > 0)
    drip = asyncio.create_task(_drip(writer))
    await until(lambda: site.door.counters["resp_cut"] == 1)
    drip.cancel()
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    await until(lambda: site.door.in_hand_bytes == 0)
    writer.close()
    reader, writer = await site.raw()
    writer.write(b"*2\r\n$3\r\nGET\r\n$10\r\nabc")
    writer.write_eof()
    assert await reader.read() == b""
    await until(lambda: site.door.counters["resp_cut"] == 2)
    writer.close()


async def _drip(writer: asyncio.StreamWriter) -> None:
    """One byte after the other."""
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.01)


async def test_client_that_takes_no_answers_is_cut(start: Start) -> None:
    """With its pipeline, and what was in hand for it."""
    site = await start(waits=Waits(answer_s=SHORT_S))
    async with site.client() as one:
        await one.set("k", bytes(4 * MIB))
        _, writer = await site.raw()
        writer.write(b"GET k\r\n" * 100)
        await until(lambda: site.door.counters["resp_cut"] == 1)
        await until(lambda: site.door.in_hand_bytes == 0)
        writer.close()
        assert await one.exists("k") == 1


async def test_limits_of_a_command_end_the_connection(start: Start) -> None:
    """A length above the limit is refused before its bytes come; up to it, everything works."""
    site = await start(value_bytes=100_000, words=10)
    for line in (b"*11\r\n", b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$100001\r\n"):
        reader, writer = await site.raw()
        writer.write(line)
        assert (await reader.read()).startswith(b"-ERR Protocol error: invalid")
        writer.close()
    async with site.client() as one:
        assert await one.set("k", bytes(100_000))
        assert await one.get("k") == bytes(100_000)


async def test_one_connection_too_many_is_turned_away(start: Start) -> None:
    """And told why; when another one ends there is room again."""
    site = await start(connections=2)
    first, second = await site.raw(), await site.raw()
    await until(lambda: site.door.counters["resp_connections"] == 2)
    third = await site.raw()
    assert b"max number of clients" in await third[0].read()
    for _, writer in (first, third):
        writer.close()
    await until(lambda: site.door.connected == 1)
    async with site.client() as one:
        assert await one.ping()
    second[1].close()
    assert site.door.counters["resp_turned_away"] == 1


async def test_bytes_in_hand_are_bounded_over_all_connections(start: Start) -> None:
    """A large value waits for others, for a while; small ones don't. A miss in a batch is an answer."""
    site = await start(in_hand_bytes=MIB, waits=Waits(budget_s=SHORT_S))
    async with site.client() as one:
        await one.set("k", bytes(600 * KIB))
        _, writer = await site.raw()
        writer.write(b"*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$700000\r\n")
        await until(lambda: site.door.in_hand_bytes > 0)
        with pytest.raises(RedisError, match="on their way"):
            await one.get("k")
        assert await one.mget("k", "none") == [None, None]
        other = site.client()
        with pytest.raises(RedisError, match="on their way"):
            await other.set("k", bytes(600 * KIB))
        await other.aclose()
        await one.set("small", b"v")
        assert await one.get("small") == b"v"
        writer.close()
        await until(lambda: site.door.in_hand_bytes == 0)
        assert await one.get("k") == bytes(600 * KIB)


async def test_budget_gives_what_comes_back_to_who_waits() -> None:
    """And only that; patience ends."""
    hasty, patient = Budget(100, 0.01), Budget(100, 60)
    for budget in (hasty, patient):
        await budget.take(70)
        await budget.take(20)
    with pytest.raises(LimitError):
        await hasty.take(11)
    waiting = asyncio.create_task(patient.take(50))
    await asyncio.sleep(0)
    await patient.give(70)
    await waiting
    assert (hasty.left, patient.left) == (10, 30)
