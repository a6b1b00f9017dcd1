"""A pool node's end of the control plane: adapts a `PoolHandler` of plain values to the generated servicer."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError, KvpoolError
from kvpool.request.pool import Grant, NodeDescription, Place, Reservation, Stored
from kvpool.wire import convert, fence
from kvpool.wire.auth import recheck
from kvpool.wire.channel import CHUNK_BYTES
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import pool_pb2 as pb
from kvpool.wire.gen import pool_pb2_grpc as rpc
from kvpool.wire.status import code_of

MAX_PATIENCE_S = 5.0
"""Longest any call waits inside a node."""
MAX_FETCH_FROM = 16
"""Nodes that one acquire may name to fetch from."""
MAX_ID_CHARS = 64


class PoolHandler(Protocol):
    """What a node does; synchronous, because its core is. Raises kvpool errors."""

    @property
    def identity(self) -> NodeIdentity:
        """Who answers; calls meant for somebody else are refused."""
        ...

    def describe(self) -> NodeDescription:
        """Answer Describe."""
        ...

    def lookup(self, keys: Sequence[bytes]) -> bytes:
        """Answer Lookup: one byte a key."""
        ...

    async def reserve(
        self, owner: str, lease_ms: int, blocks: Sequence[Reservation], *, sequence: int, tenant: str, near: bool, patience_s: float
    ) -> tuple[int, list[Grant]]:
        """Answer Reserve, within `patience_s`: it may wait for blocks to be written down to a slower tier.

        `near`: copies for readers close by, which count against no quota and are the first to leave.
        """
        ...

    def commit(self, lease_id: int, keys: Sequence[bytes]) -> list[bool]:
        """Answer Commit."""
        ...

    async def acquire(
        self, owner: str, lease_ms: int, keys: Sequence[bytes], *, sequence: int, patience_s: float, fetch_from: Sequence[str]
    ) -> tuple[int, list[Place | None]]:
        """Answer Acquire, within `patience_s`: it may fetch blocks from a slower tier, then from the nodes `fetch_from`, in order."""
        ...

    def stored(self, keys: Sequence[bytes]) -> list[Stored | None]:
        """What it takes to store each of these blocks elsewhere; asked for blocks under a lease, None for others."""
        ...

    def renew(self, lease_id: int, lease_ms: int) -> bool:
        """Answer Renew."""
        ...

    def release(self, lease_id: int, suspect: Sequence[bytes]) -> None:
        """Answer Release."""
        ...

    def window(self, lease_id: int, offset: int, length: int, *, write: bool) -> npt.NDArray[np.uint8]:
        """The arena's bytes in a range that the lease covers; `ConfigError` when it doesn't."""
        ...


def add_pool(server: grpc.aio.Server, handler: PoolHandler) -> None:
    """Register `handler` on `server`."""
    rpc.add_PoolServicer_to_server(_Servicer(handler), server)


class _Servicer(rpc.PoolServicer):
    def __init__(self, handler: PoolHandler) -> None:
        self._handler = handler

    async def Describe(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await self._answer(context, lambda: convert.description_to_pb(self._handler.describe()), fenced=False)

    async def Lookup(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await self._answer(context, lambda: pb.LookupResponse(present=self._handler.lookup(request.keys)), fenced=False)

    async def Reserve(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            blocks = convert.reservations_from_pb(request.blocks)
            lease_id, grants = await self._handler.reserve(
                request.owner,
                request.lease_ms,
                blocks,
                sequence=request.sequence,
                tenant=request.tenant,
                near=request.near,
                patience_s=_patience_s(context),
            )
            return pb.ReserveResponse(lease_id=lease_id, grants=convert.grants_to_pb(grants))

        return await self._answer(context, run)

    async def Commit(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await self._answer(context, lambda: pb.CommitResponse(committed=self._handler.commit(request.lease_id, request.keys)))

    async def Acquire(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        async def run() -> Any:
            keys, fetch_from = list(request.keys), checked_nodes(request.fetch_from)
            lease_id, places = await self._handler.acquire(
                request.owner,
                request.lease_ms,
                keys,
                sequence=request.sequence,
                patience_s=_patience_s(context),
                fetch_from=fetch_from,
            )
            if not request.detail:
                return pb.AcquireResponse(lease_id=lease_id, found=convert.places_to_pb(places))
            blocks = [None if place is None else block for place, block in zip(places, self._handler.stored(keys), strict=True)]
            return pb.AcquireResponse(lease_id=lease_id, found=convert.stored_to_pb(blocks))

        return await self._answer(context, run)

    async def Renew(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await self._answer(context, lambda: pb.RenewResponse(alive=self._handler.renew(request.lease_id, request.lease_ms)))

    async def Release(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        def run() -> Any:
            self._handler.release(request.lease_id, request.suspect)
            return pb.ReleaseResponse()

        return await self._answer(context, run)

    async def Read(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            self._check(context, needed=True)
            for data in self._pieces(request):
                yield pb.ReadChunk(data=data)
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))

    async def Write(self, requests: Any, context: grpc.aio.ServicerContext) -> Any:
        written = 0
        try:
            self._check(context, needed=True)
            async for chunk in requests:
                recheck()
                data = np.frombuffer(chunk.data, np.uint8)
                self._handler.window(chunk.lease_id, chunk.offset, data.nbytes, write=True)[:] = data
                written += data.nbytes
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))
        return pb.WriteResponse(written=written)

    def _pieces(self, request: Any) -> Iterator[bytes]:
        """The asked ranges in chunks; lease and token are checked again for every chunk, because they may end meanwhile."""
        for asked in request.ranges:
            for at in range(0, asked.length, CHUNK_BYTES):
                recheck()
                length = min(CHUNK_BYTES, asked.length - at)
                yield self._handler.window(request.lease_id, asked.offset + at, length, write=False).tobytes()

    async def _answer(self, context: grpc.aio.ServicerContext, run: Callable[[], Any], *, fenced: bool = True) -> Any:
        """What `run` answers, or promises to, once the call is known to be meant for this node."""
        try:
            self._check(context, needed=fenced)
            answer = run()
            return await answer if isinstance(answer, Awaitable) else answer
        except KvpoolError as error:
            await context.abort(code_of(error), str(error))

    def _check(self, context: grpc.aio.ServicerContext, *, needed: bool) -> None:
        fence.check(context.invocation_metadata(), self._handler.identity, needed=needed)


def checked_nodes(ids: Sequence[str]) -> tuple[str, ...]:
    """Where to fetch from; `ConfigError` for more nodes than any order has, or what is no node's id."""
    if len(ids) > MAX_FETCH_FROM or any(len(node_id) > MAX_ID_CHARS for node_id in ids):
        raise ConfigError(f"fetch_from names at most {MAX_FETCH_FROM} nodes by ids of at most {MAX_ID_CHARS} characters")
    return tuple(ids)


def _patience_s(context: grpc.aio.ServicerContext) -> float:
    """How long a call may wait: most of what its caller leaves, so that the answer still arrives."""
    left_s = context.time_remaining()
    return MAX_PATIENCE_S if left_s is None else max(0.0, min(MAX_PATIENCE_S, 0.8 * left_s))
