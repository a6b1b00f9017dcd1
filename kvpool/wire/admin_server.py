"""A pool node's end of the operator's calls: adapts an `AdminHandler` of plain values to the generated servicer.

Inspect, Quotas, Tiers and Balance may be asked by anybody; the others change something, or go on where they left off in one life of
the node, so they must say which life they mean (`fence.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import grpc.aio

from kvpool.block import BlockKey
from kvpool.errors import DeadlineError, KvpoolError
from kvpool.request import admin as a
from kvpool.wire import convert_admin as convert
from kvpool.wire import fence
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import admin_pb2 as pb
from kvpool.wire.gen import admin_pb2_grpc as rpc
from kvpool.wire.status import code_of

CALL_LIMIT_S = 120.0
"""Longest any of these calls may take in a node, whatever its caller's patience; then it is cancelled."""


class AdminHandler(Protocol):
    """What a node does for an operator. Raises kvpool errors. Keys have 32 bytes and bounds are checked before it is asked.

    A call whose caller has gone, or that takes longer than `CALL_LIMIT_S`, is cancelled.
    """

    @property
    def identity(self) -> NodeIdentity:
        """Who answers; calls meant for somebody else are refused."""
        ...

    async def inspect(self, keys: Sequence[BlockKey], *, story: bool) -> Sequence[a.Inspection]:
        """One inspection a key, same order. No lease, no use of a block, no I/O. Stories only when `story`."""
        ...

    async def evict(self, keys: Sequence[BlockKey], *, dry_run: bool) -> Sequence[a.EvictOutcome]:
        """Remove the blocks from every tier (durable ones included); one outcome a key. A dry run changes nothing.

        A lease doesn't stop it (HELD), nor does a soft pin; a hard pin does (PINNED). A block being written is unlinked too.
        """
        ...

    async def pin(self, keys: Sequence[BlockKey], *, hard: bool, duration_ms: int, owner: str) -> Sequence[a.PinOutcome]:
        """Pin for `duration_ms` from now; one outcome a key. The same owner pinning again replaces its own pin, hard or soft."""
        ...

    async def unpin(self, keys: Sequence[BlockKey], *, owner: str) -> int:
        """End `owner`'s pins; how many there were."""
        ...

    async def set_quota(self, tenant: str, max_bytes: int) -> None:
        """Bound a tenant's bytes; 0 removes the bound. The tenant "" owns what was written without a tenant."""
        ...

    async def quotas(self) -> Sequence[a.Quota]:
        """Tenants that have a quota or bytes, at most `MAX_QUOTAS`, in the order of their names."""
        ...

    async def gc(self, *, dry_run: bool) -> a.GcReport:
        """End what has run out and give back dead room; a dry run only counts."""
        ...

    async def verify(self, tier: str, *, cursor: str, max_bytes: int) -> a.VerifyReport:
        """Check the next blocks of `tier` after `cursor` ("": from the start), `max_bytes` of them or the one block that is more.

        Checking is no use of a block. A corrupt one is dropped whoever pins it. `ConfigError` for a tier that isn't there, or a
        cursor that isn't its.
        """
        ...

    async def tiers(self) -> Sequence[a.TierReport]:
        """The books of every tier, fastest first."""
        ...

    async def drain(self, *, cancel: bool, bytes_per_s: int) -> a.Balance:
        """Begin (or go on) to move everything to other nodes, at most `bytes_per_s` (0: what the cluster's configuration says).

        The node takes no more writes from those who see its state, and goes on serving what it has. `cancel`: it serves as before. Saying
        either again is harmless. `ConfigError` when it is in no cluster.
        """
        ...

    async def balance(self) -> a.Balance:
        """How far the node is with moving blocks to where they belong."""
        ...


def add_admin(server: grpc.aio.Server, handler: AdminHandler) -> None:
    """Register `handler` on `server`."""
    rpc.add_AdminServicer_to_server(_Servicer(handler), server)


class _Servicer(rpc.AdminServicer):
    def __init__(self, handler: AdminHandler) -> None:
        self._handler = handler

    async def Inspect(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            keys = convert.checked_keys(request.keys, convert.inspect_limit(request.story))
            blocks = await self._handler.inspect(keys, story=request.story)
            return pb.InspectResponse(blocks=[convert.inspection_to_pb(block) for block in blocks])

        return await self._answer(context, run, fenced=False)

    async def Evict(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            keys = convert.checked_keys(request.keys)
            return convert.evictions_to_pb(await self._handler.evict(keys, dry_run=request.dry_run))

        return await self._answer(context, run)

    async def Pin(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            keys = convert.checked_keys(request.keys)
            owner = convert.checked_text("the pin's owner", request.owner, needed=True)
            duration_ms = convert.checked_range("a pin's duration in ms", request.duration_ms, 1, a.MAX_PIN_MS)
            return convert.pins_to_pb(await self._handler.pin(keys, hard=request.hard, duration_ms=duration_ms, owner=owner))

        return await self._answer(context, run)

    async def Unpin(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            keys = convert.checked_keys(request.keys)
            owner = convert.checked_text("the pin's owner", request.owner, needed=True)
            return pb.UnpinResponse(unpinned=await self._handler.unpin(keys, owner=owner))

        return await self._answer(context, run)

    async def SetQuota(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            await self._handler.set_quota(convert.checked_text("the tenant", request.tenant), request.max_bytes)
            return pb.SetQuotaResponse()

        return await self._answer(context, run)

    async def Quotas(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            return convert.quotas_to_pb(await self._handler.quotas())

        return await self._answer(context, run, fenced=False)

    async def Gc(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            return convert.gc_to_pb(await self._handler.gc(dry_run=request.dry_run))

        return await self._answer(context, run)

    async def Verify(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            tier = convert.checked_text("the tier", request.tier, needed=True)
            cursor = convert.checked_text("the cursor", request.cursor)
            max_bytes = convert.checked_range("max_bytes", request.max_bytes, 1, a.MAX_SCRUB_BYTES)
            return convert.verified_to_pb(await self._handler.verify(tier, cursor=cursor, max_bytes=max_bytes))

        return await self._answer(context, run)

    async def Tiers(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            return convert.tiers_to_pb(await self._handler.tiers())

        return await self._answer(context, run, fenced=False)

    async def Drain(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            return convert.balance_to_pb(await self._handler.drain(cancel=request.cancel, bytes_per_s=request.bytes_per_s))

        return await self._answer(context, run)

    async def Balance(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            return convert.balance_to_pb(await self._handler.balance())

        return await self._answer(context, run, fenced=False)

    async def _answer(self, context: grpc.aio.ServicerContext, run: Callable[[], Awaitable[Any]], *, fenced: bool = True) -> Any:
        try:
            fence.check(context.invocation_metadata(), self._handler.identity, needed=fenced)
            return await _bounded(run)
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))


async def _bounded(run: Callable[[], Awaitable[Any]]) -> Any:
    limit = asyncio.timeout(CALL_LIMIT_S)
    try:
        async with limit:
            return await run()
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineError(f"the node gave the call up after {CALL_LIMIT_S:.0f} s; ask for less at once") from error
        raise
