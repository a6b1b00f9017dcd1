"""Who may call what: the table is complete, and the gate keeps to it."""

import asyncio
import importlib
import pkgutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import kvpool.wire.gen
from kvpool.clock import MonotonicClock
from kvpool.errors import AccessError, ConfigError, LimitError
from kvpool.policy.rates import Rates, TenantLimits
from kvpool.request import DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, WorkerStatus
from kvpool.security.audit import AuditLog
from kvpool.security.principal import ANYBODY, Right
from kvpool.security.tokens import TokenTable, new_token, revoke
from kvpool.testing.events_twin import MemoryEvents
from kvpool.wire import channel
from kvpool.wire.access_client import AccessRpc
from kvpool.wire.access_server import add_access
from kvpool.wire.auth import METHODS, Gate, caller
from kvpool.wire.channel import bind, make_server, open_channel
from kvpool.wire.credentials import Security
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.events_server import add_events
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.guard import Guard
from kvpool.wire.status import error_of
from kvpool.wire.worker_client import WorkerClient
from kvpool.wire.worker_server import add_worker


def all_methods() -> set[str]:
    """Every call of every service there is."""
    found: set[str] = set()
    for info in pkgutil.iter_modules(kvpool.wire.gen.__path__):
        if info.name.endswith("_pb2"):
            module = importlib.import_module(f"kvpool.wire.gen.{info.name}")
            for service in module.DESCRIPTOR.services_by_name.values():
                found |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    return found


def test_every_call_of_every_service_has_an_entry() -> None:
    """A call without one is refused: whoever adds a call must say who may make it."""
    assert all_methods() == set(METHODS)


def test_only_who_am_i_takes_no_right() -> None:
    """Everything else must be given on purpose."""
    assert [method for method, rights in METHODS.items() if not rights] == ["/kvpool.v1.Access/WhoAmI"]


def test_every_admin_call_takes_the_admin_right() -> None:
    """Verbs of operators, whatever else a principal may."""
    assert all(rights == (Right.ADMIN,) for method, rights in METHODS.items() if ".Admin/" in method)


@dataclass
class Served:
    """A server behind a gate, and the token table it looks at."""

    address: str
    tokens: Path
    audit: Path
    limits: dict[str, TenantLimits]
    server: grpc.aio.Server

    async def written(self) -> str:
        """The audit log, once it has a line: an aborted call is written down just after its caller has heard."""
        async with asyncio.timeout(20):
            while not (text := self.audit.read_text()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return text

    def client(self, *rights: str, tenant: str | None = None, name: str = "alice") -> AccessRpc:
        """A connection with a fresh token."""
        _, token = new_token(self.tokens, name=name, tenant=tenant, rights=rights, now_s=0)
        return self.with_token(token)

    def with_token(self, token: str) -> AccessRpc:
        """A connection with this token."""
        path = self.tokens.with_name(f"token-{abs(hash(token))}")
        path.write_text(token + "\n")
        return AccessRpc(self.address, security=Security(token_file=path))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    """A gate with tokens, rates and an audit log in front of Access."""
    tokens, audit, limits = tmp_path / "tokens.json", tmp_path / "audit.log", dict[str, TenantLimits]()
    new_token(tokens, name="first", tenant=None, rights=["read"], now_s=0)
    rates = Rates(lambda tenant: limits.get(tenant, TenantLimits()))
    gate = Gate(clock=MonotonicClock(), tokens=TokenTable(tokens), rates=rates, audit=AuditLog(audit))
    server = make_server([gate])
    add_access(server, Guard(tokens=TokenTable(tokens)))
    add_events(server, MemoryEvents(NodeIdentity("a" * 32, 7), ring=16, watchers=2))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    yield Served(address, tokens, audit, limits, server)
    await server.stop(0)


async def test_caller_is_who_the_token_says(served: Served) -> None:
    """And is told its rights."""
    client = served.client("read", "write")
    me = await client.who_am_i(5)
    assert (me.name, me.tenant, me.rights, me.salt) == ("alice", None, ("read", "write"), b"")
    await client.close()
    assert caller() is ANYBODY


async def test_call_without_a_token_is_refused_with_advice(served: Served) -> None:
    """The message says what to do."""
    client = AccessRpc(served.address)
    with pytest.raises(AccessError, match="--token-file"):
        await client.who_am_i(5)
    await client.close()


async def test_revoked_token_is_refused_at_the_next_call(served: Served) -> None:
    """On a connection that is open."""
    client = served.client("read")
    await client.who_am_i(5)
    revoke(served.tokens, "alice")
    with pytest.raises(AccessError, match="revoked"):
        await client.who_am_i(5)
    await client.close()


async def test_stream_ends_when_its_token_is_revoked(served: Served) -> None:
    """A call may last for ever; a revoked consumer must not go on to hear what the node holds."""
    _, token = new_token(served.tokens, name="consumer", tenant=None, rights=["worker"], now_s=0)
    path = served.tokens.with_name("consumer")
    path.write_text(token)
    events = EventsRpc(served.address, security=Security(token_file=path))
    async with aclosing(events.watch(0, 0, 20)) as batches:
        await anext(batches)
        revoke(served.tokens, "consumer")
        with pytest.raises(AccessError, match="revoked"):
            async for _ in batches:
                pass
    await events.close()


async def test_message_of_a_stranger_is_not_read(served: Served) -> None:
    """Who has no token gets its answer before its megabytes are taken in."""
    read: list[int] = []

    def deserialize(message: bytes) -> bytes:
        read.append(len(message))
        return message

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return b""

    row = grpc.unary_unary_rpc_method_handler(answer, request_deserializer=deserialize, response_serializer=bytes)
    server = make_server([Gate(clock=MonotonicClock(), tokens=TokenTable(served.tokens))])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvpool.v1.Pool", {"Lookup": row}),))
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(address) as open_one:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await open_one.unary_unary("/kvpool.v1.Pool/Lookup")(bytes(8 << 20), timeout=20)
    await server.stop(0)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert read == []


async def test_strangers_can_not_fill_the_audit_log(served: Served) -> None:
    """It is rotated: whoever may add lines without a token could so push out those that tell of operators."""
    stranger = AccessRpc(served.address)
    for _ in range(50):
        with pytest.raises(AccessError):
            await stranger.set_rates("a", requests_per_s=1, bytes_per_s=1, timeout_s=5)
    await stranger.close()
    await served.written()
    known = served.client("admin")
    for _ in range(50):
        with pytest.raises(ConfigError):
            await known.set_rates("a", requests_per_s=1, bytes_per_s=1, timeout_s=5)
    await known.close()
    async with asyncio.timeout(20):
        while (text := served.audit.read_text()).count('"who":"alice"') < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert 1 <= text.count('"who":"unknown"') < 40


async def test_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or strangers could use up all that a server may open."""
    quick = tuple((name, 100 if name == "grpc.server_handshake_timeout_ms" else value) for name, value in channel.SERVER_OPTIONS)
    monkeypatch.setattr(channel, "SERVER_OPTIONS", quick)
    server = make_server()
    host, _, port = bind(server, "127.0.0.1:0").rpartition(":")
    await server.start()
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()
    await server.stop(0)


async def test_right_that_is_missing_is_named(served: Served) -> None:
    """So that an operator can give it."""
    client = served.client("read", "write", tenant="acme")
    with pytest.raises(AccessError, match=r"alice may not call .*SetRates: it needs the right admin"):
        await client.set_rates("acme", requests_per_s=0, bytes_per_s=0, timeout_s=5)
    await client.close()
    line = await served.written()
    assert '"who":"alice"' in line
    assert "PERMISSION_DENIED" in line


async def test_admin_action_is_written_down_with_its_outcome(served: Served) -> None:
    """Also one that failed."""
    client = served.client("admin", name="root")
    with pytest.raises(ConfigError, match="--tenants"):
        await client.set_rates("acme", requests_per_s=5, bytes_per_s=0, timeout_s=5)
    await client.close()
    line = await served.written()
    assert '"who":"root"' in line
    assert '"what":"SetRates"' in line
    assert '"tenant":"acme"' in line
    assert '"outcome":"INVALID_ARGUMENT"' in line


async def test_call_above_the_rate_of_its_tenant_is_refused_for_now(served: Served) -> None:
    """Says when to come back; others go on."""
    one, other = served.client("read", tenant="acme"), served.client("read", tenant="other", name="bob")
    served.limits["acme"] = TenantLimits(requests_per_s=0.001)
    with pytest.raises(ConfigError, match="cluster-secret"):
        await one.who_am_i(5)  # let in
    with pytest.raises(LimitError, match=r"tenant acme is above its rate; try again in \d+ ms"):
        await one.who_am_i(5)
    with pytest.raises(ConfigError, match="cluster-secret"):
        await other.who_am_i(5)
    await one.close()
    await other.close()


async def test_method_without_an_entry_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails closed, for whoever it may be."""
    rest = {method: rights for method, rights in METHODS.items() if "WhoAmI" not in method}
    monkeypatch.setattr("kvpool.wire.auth.METHODS", rest)
    client = served.client("read", "write", "map", "worker", "admin")
    with pytest.raises(AccessError, match="no entry"):
        await client.who_am_i(5)
    await client.close()


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", "Basic dXNlcjpwYXNz"),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer kvp_" + "a" * 43),),
        (("authorization", "Bearer a"), ("authorization", "Bearer b")),
        (("authorization", "Bearer " + "x" * 4000),),
    ],
)
async def test_malformed_authorization_is_refused(served: Served, metadata: Any) -> None:
    """However it is malformed, and without being quoted."""
    channel = grpc.aio.insecure_channel(served.address)
    call = channel.unary_unary("/kvpool.v1.Access/WhoAmI")
    with pytest.raises(grpc.RpcError) as caught:
        await call(b"", timeout=5, metadata=metadata)
    error = error_of(caught.value, "x")
    assert isinstance(error, AccessError)
    assert "kvp_" not in str(error)
    assert "dXNl" not in str(error)
    await channel.close()


class Idle:
    """A worker that only says that it lives."""

    def prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        raise AssertionError("nobody may ask")

    def decode(self, request: DecodeRequest) -> AsyncIterator[DecodeEvent]:
        raise AssertionError("nobody may ask")

    async def status(self) -> WorkerStatus:
        return WorkerStatus(
            role="decode", model="m", active_requests=0, queued_requests=0, finished_requests=0, failed_requests=0,
            prefill_tokens_per_s=0.0, resident_tokens=0, reaches={},
        )  # fmt: skip


async def test_worker_takes_requests_from_the_deployment_only(tmp_path: Path) -> None:
    """Whoever may call it chooses the salt, so a tenant's token must not."""
    tokens, client = tmp_path / "tokens", {}
    for name, rights in (("user", ["read", "write"]), ("router", ["worker"])):
        (tmp_path / name).write_text(new_token(tokens, name=name, tenant=None, rights=rights, now_s=0)[1])
    guard = Guard(tokens=TokenTable(tokens))
    server = guard.server()
    add_worker(server, Idle())
    address = guard.bind(server, "127.0.0.1:0")
    await server.start()
    for name in ("user", "router"):
        client[name] = WorkerClient(address, Security(token_file=tmp_path / name))
    with pytest.raises(AccessError, match="needs the right worker"):
        async for _ in client["user"].prefill(PrefillRequest(request_id="r", prompt=(1,)), 5):
            pass
    assert (await client["router"].status(5)).model == "m"
    with pytest.raises(ConfigError, match="in the clear"):
        guard.bind(server, "0.0.0.0:0")
    for one in client.values():
        await one.close()
    await server.stop(0)
