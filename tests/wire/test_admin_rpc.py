"""Admin calls over real gRPC on loopback: the twin keeps the contract, bounds are held at both ends, errors keep their class."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from kvpool.block import BlockKey
from kvpool.errors import ConfigError, DeadlineError, LocalError, ProtocolError, UnavailableError
from kvpool.request import admin as a
from kvpool.testing.admin_kit import AdminKit
from kvpool.testing.admin_twin import TIER, MemoryAdmin
from kvpool.wire.admin_client import AdminRpc
from kvpool.wire.admin_server import AdminHandler, add_admin
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import admin_pb2 as pb
from kvpool.wire.gen import admin_pb2_grpc

ME = NodeIdentity("ab" * 16, 7)
KEY = b"k" * 32

Call = Callable[[AdminRpc], Awaitable[object]]


@asynccontextmanager
async def serving(handler: AdminHandler, node: NodeIdentity | None = ME) -> AsyncIterator[AdminRpc]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_admin(server, handler)
    rpc = AdminRpc(bind(server, "127.0.0.1:0"), node)
    await server.start()
    try:
        yield rpc
    finally:
        await rpc.close()
        await server.stop(None)


class TwinWorld:
    """The twin behind a real server."""

    def __init__(self, twin: MemoryAdmin, rpc: AdminRpc) -> None:
        self.twin, self.rpc, self.identity, self.tier = twin, rpc, twin.identity, TIER
        self._chains = 0

    async def put(self, count: int) -> list[bytes]:
        self._chains += 1
        keys = [bytes([self._chains, index]) * 16 for index in range(count)]
        self.twin.put(keys)
        return keys

    async def lease(self, keys: Sequence[bytes]) -> int:
        return self.twin.lease(keys, "reader")

    async def release(self, lease_id: int) -> None:
        self.twin.release(lease_id)

    async def damage(self, key: bytes) -> None:
        self.twin.damage(key)


@pytest.fixture
async def world() -> AsyncIterator[TwinWorld]:
    twin = MemoryAdmin(ME)
    async with serving(twin) as rpc:
        yield TwinWorld(twin, rpc)


class TestTwin(AdminKit):
    """The in-memory twin."""


class Odd(MemoryAdmin):
    """A node that fails, hangs, and talks too much."""

    async def gc(self, *, dry_run: bool) -> a.GcReport:
        raise LocalError("a disk is on fire")

    async def tiers(self) -> list[a.TierReport]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def inspect(self, keys: Sequence[BlockKey], *, story: bool) -> list[a.Inspection]:
        lease = a.LeaseHolder(id=1, owner="o" * 1000, kind="read", left_ms=1)
        pin = a.PinHolder(owner="p", hard=False, left_ms=1)
        lines = tuple(f"line {number}" for number in range(1000))
        return [a.Inspection(key=key, leases=(lease,) * 100, pins=(pin,) * 100, pin_count=7000, story=lines) for key in keys]

    async def unpin(self, keys: Sequence[BlockKey], *, owner: str) -> int:
        raise AssertionError(f"reached with {len(keys)} keys of {owner!r}")


async def test_answers_beyond_their_bounds_are_cut_and_counted() -> None:
    """A block with a thousand holders must not make an answer of megabytes; how many there are is said."""
    async with serving(Odd(ME)) as rpc:
        (block,) = await rpc.inspect([KEY], 10, story=True)
    assert (len(block.leases), block.lease_count, len(block.pins), block.pin_count) == (a.MAX_HOLDERS, 100, a.MAX_HOLDERS, 7000)
    assert block.leases[0].owner == "o" * (a.MAX_TEXT_CHARS - 1) + "…"
    assert block.story == tuple(f"line {number}" for number in range(1000 - a.MAX_STORY_LINES, 1000))


REFUSED: dict[str, tuple[Call, str]] = {
    "short key": (lambda rpc: rpc.evict([b"k" * 31], 10), "32 bytes, got 31"),
    "long key": (lambda rpc: rpc.inspect([b"k" * 33], 10), "32 bytes, got 33"),
    "too many to inspect": (lambda rpc: rpc.inspect([KEY] * (a.MAX_INSPECT_KEYS + 1), 10), "split the call"),
    "too many stories": (lambda rpc: rpc.inspect([KEY] * (a.MAX_STORY_KEYS + 1), 10, story=True), "split the call"),
    "too many to evict": (lambda rpc: rpc.evict([KEY] * (a.MAX_ADMIN_KEYS + 1), 10), "split the call"),
    "no owner": (lambda rpc: rpc.unpin([KEY], 10, owner=""), "owner must not be empty"),
    "long owner": (lambda rpc: rpc.pin([KEY], 10, owner="o" * 257, duration_ms=1), "257 characters"),
    "endless pin": (lambda rpc: rpc.pin([KEY], 10, owner="o", duration_ms=a.MAX_PIN_MS + 1), "duration"),
    "pin of no time": (lambda rpc: rpc.pin([KEY], 10, owner="o", duration_ms=0), "duration"),
    "long tenant": (lambda rpc: rpc.set_quota("t" * 257, 1, 10), "257 characters"),
    "negative quota": (lambda rpc: rpc.set_quota("t", -1, 10), "max_bytes"),
    "no tier": (lambda rpc: rpc.verify("", 10), "tier must not be empty"),
    "long cursor": (lambda rpc: rpc.verify(TIER, 10, cursor="c" * 257), "257 characters"),
    "step of nothing": (lambda rpc: rpc.verify(TIER, 10, max_bytes=0), "max_bytes"),
    "step of too much": (lambda rpc: rpc.verify(TIER, 10, max_bytes=a.MAX_SCRUB_BYTES + 1), "max_bytes"),
}


@pytest.mark.parametrize(("call", "words"), list(REFUSED.values()), ids=list(REFUSED))
async def test_asking_beyond_a_bound_is_refused_before_it_is_sent(call: Call, words: str) -> None:
    """The caller learns at once what to do, and no node is bothered."""
    rpc = AdminRpc("127.0.0.1:9", ME)
    with pytest.raises(ConfigError, match=words):
        await call(rpc)
    await rpc.close()


@pytest.mark.parametrize(
    ("method", "request_message"),
    [
        ("Inspect", pb.InspectRequest(keys=[b"k"])),
        ("Inspect", pb.InspectRequest(keys=[KEY] * (a.MAX_STORY_KEYS + 1), story=True)),
        ("Evict", pb.EvictRequest(keys=[KEY] * (a.MAX_ADMIN_KEYS + 1))),
        ("Pin", pb.PinRequest(keys=[KEY], owner="o", duration_ms=0)),
        ("Pin", pb.PinRequest(keys=[KEY], duration_ms=1000)),
        ("Unpin", pb.UnpinRequest(keys=[KEY])),
        ("SetQuota", pb.SetQuotaRequest(tenant="t" * 300, max_bytes=1)),
        ("Verify", pb.VerifyRequest(tier=TIER)),
        ("Verify", pb.VerifyRequest(max_bytes=1)),
    ],
)
async def test_clients_in_other_languages_meet_the_same_bounds(method: str, request_message: object) -> None:
    """The node checks for itself what arrives: a bad call is INVALID_ARGUMENT and reaches no handler."""
    async with serving(Odd(ME)) as rpc, grpc.aio.insecure_channel(rpc.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await getattr(admin_pb2_grpc.AdminStub(channel), method)(request_message, timeout=10, metadata=ME.metadata())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_that_name_nobody_may_only_look() -> None:
    """Tools may ask who holds what; whoever changes something says whom it means."""
    async with serving(MemoryAdmin(ME), None) as rpc:
        looks: list[Call] = [lambda rpc: rpc.inspect([KEY], 10), lambda rpc: rpc.quotas(10), lambda rpc: rpc.tiers(10)]
        for look in looks:
            await look(rpc)
        changes: list[Call] = [
            lambda rpc: rpc.evict([KEY], 10, dry_run=True),
            lambda rpc: rpc.pin([KEY], 10, owner="o", duration_ms=1),
            lambda rpc: rpc.unpin([KEY], 10, owner="o"),
            lambda rpc: rpc.set_quota("t", 1, 10),
            lambda rpc: rpc.gc(10, dry_run=True),
            lambda rpc: rpc.verify(TIER, 10),
        ]
        for change in changes:
            with pytest.raises(ConfigError, match="kvpool-node"):
                await change(rpc)


async def test_errors_keep_their_class_and_words() -> None:
    """A node's own trouble is its own; a hang costs the call's time limit; nobody there is said at once."""
    async with serving(Odd(ME)) as rpc:
        with pytest.raises(LocalError, match="on fire"):
            await rpc.gc(10)
        with pytest.raises(DeadlineError):
            await rpc.tiers(0.2)
    nobody = AdminRpc("127.0.0.1:9", ME)
    with pytest.raises(UnavailableError):
        await nobody.tiers(10)
    await nobody.close()


async def test_call_that_hangs_in_the_node_is_cancelled_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller without a time limit must not tie a node's handler up for ever."""
    monkeypatch.setattr("kvpool.wire.admin_server.CALL_LIMIT_S", 0.05)
    async with serving(Odd(ME)) as rpc:
        with pytest.raises(DeadlineError, match="gave the call up"):
            await rpc.tiers(60)


async def test_node_without_admin_calls_is_a_protocol_error() -> None:
    """A tool newer than a node says so instead of failing in odd ways."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    rpc = AdminRpc(bind(server, "127.0.0.1:0"), ME)
    await server.start()
    with pytest.raises(ProtocolError):
        await rpc.tiers(10)
    await rpc.close()
    await server.stop(None)


class Liar(MemoryAdmin):
    """A node that answers for other keys, and not for all."""

    async def inspect(self, keys: Sequence[BlockKey], *, story: bool) -> list[a.Inspection]:
        return [a.Inspection(key=b"x" * 32) for _ in keys]

    async def evict(self, keys: Sequence[BlockKey], *, dry_run: bool) -> list[a.EvictOutcome]:
        return []

    async def pin(self, keys: Sequence[BlockKey], *, hard: bool, duration_ms: int, owner: str) -> list[a.PinOutcome]:
        return [a.PinOutcome.PINNED] * 2


async def test_answers_that_do_not_fit_the_question_are_protocol_errors() -> None:
    """One block's outcome must never be shown as another's."""
    async with serving(Liar(ME)) as rpc:
        calls: list[Call] = [
            lambda rpc: rpc.inspect([KEY], 10),
            lambda rpc: rpc.evict([KEY], 10),
            lambda rpc: rpc.pin([KEY], 10, owner="o", duration_ms=1),
        ]
        for call in calls:
            with pytest.raises(ProtocolError):
                await call(rpc)
