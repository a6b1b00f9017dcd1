"""The SDK against nodes that ask who calls: over TLS, with a token, each tenant by itself."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import kvpool
from kvpool.block import Geometry, Namespace
from kvpool.client.sdk import AsyncClient
from kvpool.errors import AccessError, UnavailableError
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.security.audit import AuditLog
from kvpool.security.salt import Salts, tenant_salt
from kvpool.security.tenants import TenantBook
from kvpool.security.tokens import TokenTable, new_token, revoke
from kvpool.testing.certificates import Authority
from kvpool.units import MIB
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.guard import Guard

GEOMETRY = Geometry.uniform(layers=2, kv_heads=2, head_dim=8, block_tokens=16, dtype="float32")
NAMESPACE = Namespace(model="m", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none")
TOKENS = list(range(48))
SECRET = b"the-secret-of-the-whole-cluster-0123456789"


@dataclass
class Site:
    """A guarded node and what its callers need."""

    node: PoolNode
    directory: Path
    authority: Authority
    tokens: list[str]

    def security(self, name: str, *rights: str, tenant: str | None = None) -> Security:
        """Credentials with a fresh token."""
        _, token = new_token(self.directory / "tokens", name=name, tenant=tenant, rights=rights or ("read", "write"), now_s=0)
        self.tokens.append(token)
        path = self.directory / f"token-{name}"
        path.write_text(token)
        return self.authority.client(path)

    async def client(self, security: Security, namespace: Namespace = NAMESPACE) -> AsyncClient:
        """An SDK client."""
        return await kvpool.connect_async(self.node.address, namespace=namespace, security=security, timeout_s=5)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    authority = Authority(tmp_path)
    new_token(tmp_path / "tokens", name="first", tenant=None, rights=["read"], now_s=0)
    (tmp_path / "secret").write_bytes(SECRET)
    guard = Guard(
        security=authority.server(),
        tokens=TokenTable(tmp_path / "tokens"),
        book=TenantBook(tmp_path / "tenants.json"),
        salts=Salts(tmp_path / "secret"),
        audit=AuditLog(tmp_path / "audit.log"),
    )
    node = PoolNode(NodeConfig(capacity_bytes=4 * MIB, offers=("shm", "grpc"), arena_directory=tmp_path, guard=guard))
    await node.start()
    yield Site(node, tmp_path, authority, [])
    await node.stop()


def blocks(fill: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return np.full((3, 2, 2, 2, 16, 8), fill, np.float32)


async def test_equal_prompts_of_two_tenants_share_nothing(site: Site) -> None:
    """Each finds its own bytes; the salt is the tenant's, and a client's own salt only narrows it."""
    alice, bob = await site.client(site.security("a", tenant="alice")), await site.client(site.security("b", tenant="bob"))
    assert await alice.put(TOKENS, blocks(1)) == 48
    assert (await alice.lookup(TOKENS), await bob.lookup(TOKENS)) == (48, 0)
    assert (await bob.get(TOKENS)).tokens == 0
    assert await bob.put(TOKENS, blocks(2)) == 48
    assert np.all((await alice.get(TOKENS)).blocks == 1)
    assert np.all((await bob.get(TOKENS)).blocks == 2)
    assert alice.pool.namespace.salt == tenant_salt(SECRET, "alice")
    thief = await site.client(site.security("c", tenant="bob"), replace(NAMESPACE, salt=tenant_salt(SECRET, "alice")))
    assert await thief.lookup(TOKENS) == 0
    for client in (alice, bob, thief):
        await client.close()


async def test_shared_memory_is_for_those_with_the_right(site: Site) -> None:
    """A mapping opens everybody's bytes: a tenant's client reads through the owner."""
    tenant, worker = await site.client(site.security("a", tenant="alice")), await site.client(site.security("w", "worker", "map"))
    for client, reach in ((tenant, "grpc"), (worker, "shm")):
        assert await client.put(TOKENS, blocks(3)) == 48
        assert list(client.pool.reaches().values()) == [reach]
        await client.close()


async def test_wrong_token_and_wrong_authority_are_told_at_once(site: Site, tmp_path: Path) -> None:
    """Not as a pool that holds nothing."""
    (tmp_path / "bad").write_text("kvp_" + "x" * 43)
    with pytest.raises(AccessError, match="kvpool token new"):
        await site.client(site.authority.client(tmp_path / "bad"))
    (tmp_path / "other").mkdir()
    with pytest.raises(UnavailableError, match="not trusted"):
        await site.client(Authority(tmp_path / "other").client())
    assert await (await site.client(PLAIN)).lookup(TOKENS) == 0  # nobody there is a miss, as ever


async def test_no_secret_in_any_log(site: Site, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """A whole flow at debug level: connect, write, read, be refused, administer."""
    with caplog.at_level(logging.DEBUG):
        await test_equal_prompts_of_two_tenants_share_nothing(site)
        reader = await site.client(site.security("reader", "read"))
        assert await reader.put(TOKENS, blocks(1)) == 0
        await reader.close()
        admin = AdminRpc(site.node.address, NodeIdentity(site.node.node_id, site.node.incarnation), site.security("root", "admin"))
        await admin.set_quota("alice", 1 << 20, 5)
        await admin.close()
    shown = capfd.readouterr()
    text = caplog.text + shown.out + shown.err + (site.directory / "audit.log").read_text()
    assert "needs the right" in text
    assert "SetQuota" in text
    salts = [tenant_salt(SECRET, tenant).hex() for tenant in ("alice", "bob")]
    assert [secret[:8] for secret in (*site.tokens, SECRET.decode(), *salts) if secret in text] == []


class Tap:
    """A proxy in front of a node that keeps every byte that passes, both ways."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self.seen = bytearray()

    async def start(self) -> str:
        """Listen; where."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._host, int(self._port))
        await asyncio.gather(self._pass(reader, there[1]), self._pass(there[0], writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.seen += data
                writer.write(data)
                await writer.drain()
        writer.close()


@pytest.mark.parametrize("secured", [True, False])
async def test_no_plaintext_on_the_wire(site: Site, tmp_path: Path, secured: bool) -> None:
    """Neither KV nor keys nor the token; without TLS the tap does see them, so it would."""
    plain = PoolNode(NodeConfig(capacity_bytes=4 * MIB, offers=("grpc",), arena_directory=tmp_path))
    await plain.start()
    tap = Tap(site.node.address if secured else plain.address)
    try:
        security = site.security("a", tenant="alice") if secured else PLAIN
        client = await kvpool.connect_async(await tap.start(), namespace=NAMESPACE, security=security, timeout_s=5)
        marked = np.random.default_rng(1).random((3, 2, 2, 2, 16, 8), np.float32)
        assert await client.put(TOKENS, marked) == 48
        assert (await client.get(TOKENS)).tokens == 48
        key = client.pool.keys(TOKENS)[0]
        await client.close()
    finally:
        tap.close()
        await plain.stop()
    secrets = [marked.tobytes()[:200], key, *(token.encode() for token in site.tokens)]
    assert [secret in tap.seen for secret in secrets] == ([False] * 3 if secured else [True] * 2)
    assert len(tap.seen) > marked.nbytes


async def test_refusal_makes_no_node_ill(site: Site) -> None:
    """A client whose token was revoked finds nothing, and tells nobody that the node is dead."""
    client = await site.client(site.security("gone", "worker"))
    assert await client.put(TOKENS, blocks(1)) == 48
    revoke(site.directory / "tokens", "gone")
    links = client.pool._core.links
    (ref,) = links.nodes()
    assert await client.lookup(TOKENS) == 0
    await links.failed(ref, reach="shm")  # the connection is lost: each further call has to connect
    with pytest.raises(AccessError, match="revoked"):
        await links.link(ref, 5)
    assert links.health._records[ref].strikes == {}
    await client.close()
