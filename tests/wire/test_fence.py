"""Calls meant for another node, or another life of this one, are refused before they touch anything."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import numpy as np
import numpy.typing as npt
import pytest

from kvpool.errors import ConfigError, UnavailableError
from kvpool.request.pool import NodeDescription, Reservation
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.pool_server import add_pool

ME = NodeIdentity("ab" * 16, 7)
KEY = b"k" * 32

Call = Callable[[PoolRpc], Awaitable[object]]
CALLS: dict[str, Call] = {
    "reserve": lambda rpc: rpc.reserve("me", 1000, [Reservation(KEY, b"", 0, 64)], 10),
    "commit": lambda rpc: rpc.commit(1, [KEY], 10),
    "acquire": lambda rpc: rpc.acquire("me", 1000, [KEY], 10),
    "renew": lambda rpc: rpc.renew(1, 1000, 10),
    "release": lambda rpc: rpc.release(1, [], 10),
}
PROBES: dict[str, Call] = {"describe": lambda rpc: rpc.describe(10), "lookup": lambda rpc: rpc.lookup([KEY], 10)}


class Handler:
    """A node whose state must not be touched by strangers."""

    identity = ME

    def describe(self) -> NodeDescription:
        return NodeDescription(
            node_id=ME.node_id,
            incarnation=ME.incarnation,
            capacity_bytes=3,
            free_bytes=1,
            used_bytes=1,
            pinned_bytes=1,
            blocks=1,
            read_leases=0,
            write_leases=0,
        )

    def lookup(self, keys: list[bytes]) -> bytes:
        return bytes(len(keys))

    async def acquire(
        self, owner: str, lease_ms: int, keys: list[bytes], *, sequence: int, patience_s: float, fetch_from: tuple[str, ...]
    ) -> tuple[int, list[None]]:
        return 0, [None for _ in keys]

    def window(self, lease_id: int, offset: int, length: int, *, write: bool) -> npt.NDArray[np.uint8]:
        raise AssertionError("reached the bytes")


@asynccontextmanager
async def calling(node: NodeIdentity | None) -> AsyncIterator[PoolRpc]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_pool(server, Handler())  # type: ignore[arg-type]
    rpc = PoolRpc(bind(server, "127.0.0.1:0"), node)
    await server.start()
    try:
        yield rpc
    finally:
        await rpc.close()
        await server.stop(None)


@pytest.mark.parametrize("node", [NodeIdentity("cd" * 16, 7), NodeIdentity(ME.node_id, 6)], ids=["other node", "other life"])
async def test_every_call_meant_for_another_is_refused(node: NodeIdentity) -> None:
    """A lease id or an offset of somebody else must never be taken for one of ours."""
    async with calling(node) as rpc:
        for call in (CALLS | PROBES).values():
            with pytest.raises(UnavailableError, match="was meant for"):
                await call(rpc)


async def test_calls_that_name_nobody_may_only_look() -> None:
    """Tools may ask who is there; whoever changes something says whom it means."""
    async with calling(None) as rpc:
        for call in CALLS.values():
            with pytest.raises(ConfigError, match="kvpool-node"):
                await call(rpc)
        for call in PROBES.values():
            await call(rpc)


async def test_calls_meant_for_us_are_served() -> None:
    """The fence lets the right ones through."""
    async with calling(ME) as rpc:
        assert (await rpc.describe(10)).incarnation == 7
        assert await rpc.lookup([KEY, KEY], 10) == b"\0\0"
        assert await rpc.acquire("me", 1000, [KEY], 10) == (0, [None])
