"""Hostile and malformed input to a real node behind mutual TLS and tokens: refused with words that help, and the node lives on."""

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvpool.cluster import open_membership
from kvpool.errors import AccessError, ConfigError, KvpoolError, LimitError, ProtocolError, UnavailableError
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.request.pool import Outcome, Reservation
from kvpool.security.audit import AuditLog
from kvpool.security.salt import Salts
from kvpool.security.tenants import TenantBook
from kvpool.security.tokens import TokenTable, new_token, revoke
from kvpool.testing.certificates import Authority
from kvpool.units import MIB
from kvpool.wire.access_client import AccessRpc
from kvpool.wire.channel import OPTIONS, open_channel
from kvpool.wire.credentials import Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import admin_pb2, peer_pb2, pool_pb2, worker_pb2
from kvpool.wire.guard import Guard
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.status import error_of

KEY = bytes(range(32))
FULL = 1 << 64


@dataclass
class Target:
    """The node, and who attacks it: `rights` and `tenant` make a token, `security` a connection."""

    node: PoolNode
    directory: Path
    authority: Authority
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> NodeIdentity:
        return NodeIdentity(self.node.node_id, self.node.incarnation)

    def token(self, name: str, *rights: str, tenant: str | None = None) -> str:
        """A token, made once."""
        if name not in self.tokens:
            _, self.tokens[name] = new_token(self.directory / "tokens", name=name, tenant=tenant, rights=rights, now_s=0)
        return self.tokens[name]

    def security(self, token: str | None) -> Security:
        """A good client's certificate, and this token."""
        path = self.directory / f"token-{secrets.token_hex(4)}"
        if token is not None:
            path.write_text(token)
        return self.authority.client(None if token is None else path, shows=self.authority.sign("client"))

    async def raw(self, method: str, request: Any, *metadata: tuple[str, str], streams: bool = False, **options: Any) -> Any:
        """A call as it comes over the wire; raises kvpool errors."""
        channel = open_channel(self.node.address, self.security(None))
        body = request if isinstance(request, bytes) else request.SerializeToString()
        try:
            if streams:
                return [message async for message in channel.unary_stream(method)(body, timeout=10, metadata=metadata, **options)]
            return await channel.unary_unary(method)(body, timeout=10, metadata=metadata, **options)
        except grpc.RpcError as error:
            raise error_of(error, self.node.address) from error
        finally:
            await channel.close()

    async def user(self, method: str, request: Any, *metadata: tuple[str, str], streams: bool = False) -> Any:
        """A call of a tenant's user, fenced."""
        token = self.token("user", "read", "write", tenant="acme")
        return await self.raw(method, request, *self.identity.metadata(), ("authorization", f"Bearer {token}"), *metadata, streams=streams)

    async def admin(self, method: str, request: Any) -> Any:
        """A call of an operator, fenced."""
        token = self.token("root", "admin")
        return await self.raw(method, request, *self.identity.metadata(), ("authorization", f"Bearer {token}"))


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    """A node with everything switched on."""
    authority = Authority(tmp_path)
    new_token(tmp_path / "tokens", name="first", tenant=None, rights=["read"], now_s=0)
    (tmp_path / "secret").write_bytes(b"s" * 32)
    guard = Guard(
        security=authority.server(mutual=True),
        tokens=TokenTable(tmp_path / "tokens"),
        book=TenantBook(tmp_path / "tenants.json"),
        salts=Salts(tmp_path / "secret"),
        audit=AuditLog(tmp_path / "audit.log"),
    )
    membership = open_membership(f"memory://hostile-{secrets.token_hex(8)}")
    node = PoolNode(NodeConfig(capacity_bytes=4 * MIB, offers=("shm", "grpc"), arena_directory=tmp_path, guard=guard), membership)
    await node.start()
    yield Target(node, tmp_path, authority)
    await node.stop()
    membership.close()


async def assert_serves(target: Target) -> None:
    """A good tenant can store a block and finds it again, and nobody else's quota or lease was touched."""
    pool = PoolRpc(target.node.address, target.identity, target.security(target.token("good", "read", "write", tenant="good")))
    try:
        key = secrets.token_bytes(32)
        lease_id, grants = await pool.reserve("good", 5000, [Reservation(key, b"", 0, 1000)], 10)
        assert grants[0][0] is Outcome.GRANTED
        assert await pool.commit(lease_id, [key], 10) == [True]
        assert await pool.lookup([key], 10) == b"\1"
    finally:
        await pool.close()


Attack = Callable[[Target], Awaitable[Any]]
ATTACKS: dict[str, tuple[type[KvpoolError] | tuple[type[KvpoolError], ...], str, Attack]] = {}


def attack(kind: Any, words: str) -> Callable[[Attack], Attack]:
    """Register an attack that must end in an error of `kind` that says `words` (a regular expression)."""

    def keep(function: Attack) -> Attack:
        ATTACKS[function.__name__] = kind, words, function
        return function

    return keep


def pool(name: str) -> str:
    return f"/kvpool.v1.Pool/{name}"


def reserve(*, block: dict[str, Any] | None = None, **changes: Any) -> pool_pb2.ReserveRequest:
    """A good reservation but for some fields, of its block or its own."""
    fields: dict[str, Any] = {"owner": "o", "lease_ms": 1000, "blocks": [{"key": KEY, "length": 1000, **(block or {})}]}
    return pool_pb2.ReserveRequest(**fields | changes)


# Who is it?


@attack(AccessError, "wants a token")
async def no_token(on: Target) -> None:
    await on.raw(pool("Describe"), b"")


@attack(AccessError, "not known")
async def made_up_token(on: Target) -> None:
    await on.raw(pool("Describe"), b"", ("authorization", "Bearer kvp_" + secrets.token_urlsafe(32)))


@attack(AccessError, "revoked")
async def revoked_token(on: Target) -> None:
    token = on.token("gone", "read")
    revoke(on.directory / "tokens", "gone")
    await on.raw(pool("Describe"), b"", ("authorization", f"Bearer {token}"))


@attack(AccessError, "once, as 'Bearer TOKEN'")
async def password_instead_of_a_token(on: Target) -> None:
    await on.raw(pool("Describe"), b"", ("authorization", "Basic cm9vdDpyb290"))


@attack(AccessError, "once")
async def two_tokens(on: Target) -> None:
    good = ("authorization", f"Bearer {on.token('root', 'admin')}")
    await on.raw(pool("Describe"), b"", good, good)


@attack(AccessError, "not known")
async def digest_instead_of_the_token(on: Target) -> None:
    digest = hashlib.sha256(on.token("root", "admin").encode()).hexdigest()
    await on.raw(pool("Describe"), b"", ("authorization", f"Bearer {digest}"))


@attack((LimitError, UnavailableError), "metadata|header|.")
async def huge_metadata(on: Target) -> None:
    await on.raw(pool("Describe"), b"", ("authorization", "Bearer " + "x" * 200_000))


@attack((LimitError, AccessError, UnavailableError), "metadata|header|token|.")
async def thousands_of_headers(on: Target) -> None:
    await on.raw(pool("Describe"), b"", *((f"x-{number}", "y" * 100) for number in range(2000)))


# May they?


@attack(AccessError, "needs the right admin")
async def user_evicts(on: Target) -> None:
    await on.user("/kvpool.v1.Admin/Evict", admin_pb2.EvictRequest(keys=[KEY]))


@attack(AccessError, "needs the right admin")
async def user_lifts_a_quota(on: Target) -> None:
    await on.user("/kvpool.v1.Admin/SetQuota", admin_pb2.SetQuotaRequest(tenant="acme", max_bytes=0))


@attack(AccessError, "needs the right admin")
async def user_drains_the_node(on: Target) -> None:
    await on.user("/kvpool.v1.Admin/Drain", b"")


@attack(AccessError, "needs the right worker or admin")
async def user_listens_to_events(on: Target) -> None:
    await on.user("/kvpool.v1.Events/Watch", b"", streams=True)


@attack(AccessError, "needs the right worker")
async def user_plays_a_node(on: Target) -> None:
    await on.user("/kvpool.v1.Peer/Handover", peer_pb2.HandoverRequest(node_id="x", incarnation=1))


@attack(AccessError, "needs the right worker")
async def user_asks_for_heads(on: Target) -> None:
    await on.user("/kvpool.v1.Peer/Heads", peer_pb2.HeadsRequest(keys=[KEY], extent_tokens=512))


@attack(AccessError, "needs the right write")
async def reader_writes(on: Target) -> None:
    token = on.token("reader", "read", tenant="acme")
    await on.raw(pool("Reserve"), reserve(), *on.identity.metadata(), ("authorization", f"Bearer {token}"))


@attack(AccessError, "needs the right read")
async def writer_reads(on: Target) -> None:
    token = on.token("writer", "write", tenant="acme")
    request = pool_pb2.AcquireRequest(owner="o", lease_ms=1, keys=[KEY])
    await on.raw(pool("Acquire"), request, *on.identity.metadata(), ("authorization", f"Bearer {token}"))


@attack(AccessError, "not for another one")
async def user_writes_as_another_tenant(on: Target) -> None:
    await on.user(pool("Reserve"), reserve(tenant="victim"))


@attack(AccessError, "near copies")
async def user_makes_near_copies_against_no_quota(on: Target) -> None:
    await on.user(pool("Reserve"), reserve(near=True))


@attack(AccessError, "own nodes only")
async def user_asks_for_details(on: Target) -> None:
    await on.user(pool("Acquire"), pool_pb2.AcquireRequest(owner="o", lease_ms=1000, keys=[KEY], detail=True))


@attack(ProtocolError, ".")
async def worker_call_to_a_node(on: Target) -> None:
    await on.user("/kvpool.v1.Worker/Prefill", worker_pb2.PrefillRequest(prompt=[1]))


@attack(ProtocolError, ".")
async def call_that_does_not_exist(on: Target) -> None:
    await on.admin("/kvpool.v1.Pool/Format", b"")


# Whom do they mean?


@attack(UnavailableError, "was meant for")
async def another_nodes_identity(on: Target) -> None:
    await on.raw(pool("Reserve"), reserve(), ("kvpool-node", "f" * 32 + "/1"), ("authorization", f"Bearer {on.token('u', 'write')}"))


@attack(ConfigError, "doesn't say which node")
async def no_identity(on: Target) -> None:
    await on.raw(pool("Reserve"), reserve(), ("authorization", f"Bearer {on.token('u', 'write')}"))


@attack(UnavailableError, "was meant for")
async def malformed_identity(on: Target) -> None:
    await on.raw(pool("Reserve"), reserve(), ("kvpool-node", "../../etc"), ("authorization", f"Bearer {on.token('u', 'write')}"))


# What do they say?


@attack(ProtocolError, ".")
async def truncated_message(on: Target) -> None:
    await on.user(pool("Reserve"), reserve().SerializeToString()[:-3])


@attack(ProtocolError, ".")
async def random_bytes(on: Target) -> None:
    await on.user(pool("Acquire"), b"\xff" * 100)


@attack(LimitError, "larger than max")
async def message_above_the_limit(on: Target) -> None:
    await on.user(pool("Lookup"), pool_pb2.LookupRequest(keys=[bytes(32)] * 1_100_000))


@attack(ConfigError, "65536")
async def batch_of_too_many_keys(on: Target) -> None:
    await on.user(pool("Lookup"), pool_pb2.LookupRequest(keys=[KEY] * 65_537))


@attack(ConfigError, "more than 512")
async def inspection_of_too_many_keys(on: Target) -> None:
    await on.admin("/kvpool.v1.Admin/Inspect", admin_pb2.InspectRequest(keys=[KEY] * 5000))


@attack(ConfigError, "32 bytes")
async def short_key(on: Target) -> None:
    await on.user(pool("Lookup"), pool_pb2.LookupRequest(keys=[KEY[:31]]))


@attack(ConfigError, "32 bytes")
async def long_key(on: Target) -> None:
    await on.user(pool("Reserve"), reserve(block={"key": KEY + b"x"}))


@attack(ConfigError, "32 bytes")
async def path_as_a_key(on: Target) -> None:
    await on.user(pool("Lookup"), pool_pb2.LookupRequest(keys=[b"../../../etc/passwd"]))


@attack(ConfigError, "32 bytes")
async def short_parent(on: Target) -> None:
    await on.user(pool("Reserve"), reserve(block={"parent": b"p"}))


@attack(ConfigError, ".")
async def block_without_bytes(on: Target) -> None:
    await on.user(pool("Reserve"), reserve(block={"length": 0}))


@attack(ConfigError, ".")
async def priority_out_of_range(on: Target) -> None:
    await on.user(pool("Reserve"), reserve(block={"priority": 4_000_000_000}))


@attack(ConfigError, ".")
async def owner_without_end(on: Target) -> None:
    await on.user(pool("Reserve"), reserve(owner="o" * 100_000))


@attack(ConfigError, ".")
async def lease_of_no_time(on: Target) -> None:
    await on.user(pool("Reserve"), reserve(lease_ms=0))


@attack(ConfigError, "not covered")
async def read_without_a_lease(on: Target) -> None:
    request = pool_pb2.ReadRequest(lease_id=1, ranges=[pool_pb2.Range(offset=0, length=1000)])
    await on.user(pool("Read"), request, streams=True)


@attack(ConfigError, "not covered")
async def read_beyond_everything(on: Target) -> None:
    request = pool_pb2.ReadRequest(lease_id=FULL - 1, ranges=[pool_pb2.Range(offset=FULL - 1, length=FULL - 1)])
    await on.user(pool("Read"), request, streams=True)


@attack(ConfigError, "not covered")
async def read_with_another_tenants_lease(on: Target) -> None:
    victim = on.security(on.token("victim", "read", "write", tenant="victim"))
    rpc = PoolRpc(on.node.address, on.identity, victim)
    try:
        lease_id, grants = await rpc.reserve("v", 60_000, [Reservation(KEY, b"", 0, 1000)], 10)
        assert await rpc.commit(lease_id, [KEY], 10) == [True]
        lease_id, places = await rpc.acquire("v", 60_000, [KEY], 10)
        assert places[0] is not None
        assert grants[0][1] == places[0][0]
    finally:
        await rpc.close()
    ranges = [pool_pb2.Range(offset=places[0][0], length=places[0][1])]
    await on.user(pool("Read"), pool_pb2.ReadRequest(lease_id=lease_id, ranges=ranges), streams=True)


@attack(ConfigError, "letters, digits")
async def tenant_with_control_characters(on: Target) -> None:
    await on.admin("/kvpool.v1.Admin/SetQuota", admin_pb2.SetQuotaRequest(tenant="a\x1b[2J\n", max_bytes=1))


@attack(ConfigError, "letters, digits")
async def tenant_that_is_a_path(on: Target) -> None:
    await on.admin("/kvpool.v1.Admin/SetQuota", admin_pb2.SetQuotaRequest(tenant="../../etc/passwd", max_bytes=1))


@attack(ConfigError, "no tier")
async def tier_that_is_a_path(on: Target) -> None:
    await on.admin("/kvpool.v1.Admin/Verify", admin_pb2.VerifyRequest(tier="../../etc/passwd", max_bytes=1000))


@attack(ConfigError, ".")
async def pin_for_ever(on: Target) -> None:
    await on.admin("/kvpool.v1.Admin/Pin", admin_pb2.PinRequest(keys=[KEY], hard=True, duration_ms=FULL - 1, owner="o"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
async def test_rate_that_is_no_number_is_refused(target: Target, value: float) -> None:
    """And nothing is written to the file of limits."""
    rpc = AccessRpc(target.node.address, security=target.security(target.token("root", "admin")))
    with pytest.raises(ConfigError, match="number"):
        await rpc.set_rates("acme", requests_per_s=value, bytes_per_s=0, timeout_s=10)
    await rpc.close()
    assert TenantBook(target.directory / "tenants.json").all() == {}
    await assert_serves(target)


@pytest.mark.parametrize("name", list(ATTACKS))
async def test_attack_is_refused_and_the_node_lives(target: Target, name: str) -> None:
    """Every one ends in an error that says something, tells no secret, and costs nobody else anything."""
    kind, words, run = ATTACKS[name]
    await assert_serves(target)
    with pytest.raises(kind, match=words) as caught:
        await run(target)
    message = str(caught.value)
    assert len(message) > len(target.node.address) + 5
    assert not any(token in message for token in target.tokens.values())
    await assert_serves(target)


def test_there_are_enough_attacks() -> None:
    """The table only grows."""
    assert len(ATTACKS) >= 40


# At the door


@pytest.mark.parametrize("shown", ["none", "self-made", "expired"])
async def test_client_without_a_good_certificate_is_not_let_in(target: Target, tmp_path: Path, shown: str) -> None:
    """A good token does not help."""
    (tmp_path / "other").mkdir()
    pair = {"none": None, "self-made": Authority(tmp_path / "other").sign("x"), "expired": target.authority.sign("late", days=-1)}[shown]
    token = tmp_path / "t"
    token.write_text(target.token("root", "admin"))
    rpc = PoolRpc(target.node.address, target.identity, target.authority.client(token, shows=pair))
    with pytest.raises(UnavailableError, match="--tls-cert"):
        await rpc.describe(10)
    await rpc.close()
    await assert_serves(target)


async def test_plain_client_is_not_let_in(target: Target) -> None:
    """Nor does it hear anything but how to connect."""
    channel = grpc.aio.insecure_channel(target.node.address, options=OPTIONS)
    with pytest.raises(grpc.RpcError) as caught:
        await channel.unary_unary(pool("Describe"))(b"", timeout=10)
    assert "does the server speak TLS" in str(error_of(caught.value, "x"))
    await channel.close()
    await assert_serves(target)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
        b"\x16\x03\x01\xff\xff" + bytes(100),
        b"\x16\x03\x01\x00\x05\x01\x00",
        os.urandom(4096),
        b"\xff" * 1_000_000,
    ],
    ids=["nothing", "http1", "plain-http2", "long-hello", "cut-hello", "noise", "flood"],
)
async def test_bytes_that_are_no_handshake_are_dropped(target: Target, sent: bytes) -> None:
    """The connection ends without a word of anything inside."""
    host, _, port = target.node.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(sent)
        await writer.drain()
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(4096), 10)
        assert target.node.node_id.encode() not in answer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await assert_serves(target)


async def test_what_operators_do_is_written_down_and_no_token_is(target: Target) -> None:
    """Refused attempts too; files are private."""
    with contextlib.suppress(KvpoolError):
        await target.user("/kvpool.v1.Admin/Evict", admin_pb2.EvictRequest(keys=[KEY]))
    await target.admin("/kvpool.v1.Admin/SetQuota", admin_pb2.SetQuotaRequest(tenant="acme", max_bytes=1 << 20))
    lines = (target.directory / "audit.log").read_text().splitlines()
    assert '"who":"user"' in lines[0]
    assert '"outcome":"PERMISSION_DENIED"' in lines[0]
    assert '"who":"root"' in lines[1]
    assert '"max_bytes":1048576' in lines[1]
    assert '"outcome":"OK"' in lines[1]
    assert not any(token in line for line in lines for token in target.tokens.values())
    for name in ("audit.log", "tokens", "tenants.json"):
        assert (target.directory / name).stat().st_mode & 0o777 == 0o600
    arenas = [path for path in target.directory.iterdir() if path.is_file() and path.stat().st_size >= 4 * MIB]
    assert arenas
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in arenas)
