"""Events over a real server: the twin keeps the contract, and what can't be read is a broken protocol."""

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import grpc.aio
import pytest

from kvpool.block import BlockKey
from kvpool.errors import DeadlineError, ProtocolError
from kvpool.request.events import DRAM
from kvpool.testing.events_kit import EventsKit
from kvpool.testing.events_twin import MemoryEvents
from kvpool.wire.channel import SERVER_OPTIONS, bind
from kvpool.wire.events_client import EventsRpc
from kvpool.wire.events_server import add_events
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import events_pb2 as pb
from kvpool.wire.gen import events_pb2_grpc as rpc_gen


class TwinWorld:
    """The twin behind a server."""

    def __init__(self, twin: MemoryEvents, address: str) -> None:
        self.twin, self.identity, self.address = twin, twin.identity, address
        self._chains = 0

    async def put(self, count: int) -> list[BlockKey]:
        self._chains += 1
        keys = [BlockKey(sha256(b"%d/%d" % (self._chains, at)).digest()) for at in range(count)]
        for at, key in enumerate(keys):
            self.twin.events.stored(DRAM, key, keys[at - 1] if at else None, 16 * at)
        return keys

    async def drop(self, keys: list[BlockKey]) -> None:
        for key in keys:
            self.twin.events.removed(DRAM, key)

    async def stop(self) -> None:
        self.twin.open = False


@pytest.fixture
async def world() -> AsyncIterator[TwinWorld]:
    server, twin = grpc.aio.server(options=SERVER_OPTIONS), MemoryEvents(NodeIdentity("a" * 32, 7), ring=16, watchers=2)
    add_events(server, twin)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    yield TwinWorld(twin, address)
    await server.stop(None)


class TestTwin(EventsKit):
    """The twin."""


class Strange(rpc_gen.EventsServicer):
    """A server that says one odd thing, or nothing at all."""

    def __init__(self, message: pb.EventBatch | None) -> None:
        self._message = message

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        if self._message is not None:
            await context.write(self._message)
        else:
            async with asyncio.timeout(20):
                await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        (pb.EventBatch(keys=bytes(31)), ProtocolError, "can't be read"),
        (pb.EventBatch(keys=bytes(32), parents=bytes(32), depths=[0], tiers=b"\x09"), ProtocolError, "a tier we don't know"),
        (pb.EventBatch(after=2, sequence=1), ProtocolError, "can't be read"),
        (pb.EventBatch(removed=bytes(32 * 4097)), ProtocolError, "4097 blocks in one batch"),
        (None, DeadlineError, "no keep-alive for 0.3 s"),
    ],
)
async def test_server_that_says_nonsense_or_nothing_is_told_of(message: pb.EventBatch | None, error: type[Exception], words: str) -> None:
    """A consumer must never take in half a batch, nor wait for ever."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    rpc_gen.add_EventsServicer_to_server(Strange(message), server)
    address = bind(server, "127.0.0.1:0")
    await server.start()
    rpc = EventsRpc(address)
    try:
        with pytest.raises(error, match=words):
            await anext(rpc.watch(0, 0, 0.3))
    finally:
        await rpc.close()
        await server.stop(None)
