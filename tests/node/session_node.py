"""A node in a test's own process, and clients of its host: mapped arena, board, session."""

import asyncio
import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from kvpool.block import BlockKey
from kvpool.node.service import NodeConfig, PoolNode
from kvpool.pool import PoolState
from kvpool.pool.allocator import aligned
from kvpool.request.pool import NodeDescription, Outcome, Reservation, Slab
from kvpool.tier import Arena, ArenaMapping
from kvpool.tier.board import BoardReader, Cell
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.session_client import Session

DEADLINE_S = 20.0
LENGTH = 4096


def keys_of(name: str, count: int) -> list[BlockKey]:
    """Some keys."""
    return [BlockKey(sha256(f"{name}/{i}".encode()).digest()) for i in range(count)]


def chain(name: str, count: int, length: int = LENGTH) -> list[Reservation]:
    """A chain of blocks to write."""
    keys = keys_of(name, count)
    return [Reservation(key, keys[i - 1] if i else b"", 16 * i, length) for i, key in enumerate(keys)]


class Client:
    """One process of the node's host, as far as the node can tell."""

    def __init__(self, described: NodeDescription, *, holds: int = 64) -> None:
        assert described.shm is not None
        self.node = NodeIdentity(described.node_id, described.incarnation)
        self.cell = Cell.create(holds=holds)
        self.session = Session.open(described.shm.session, self.node, "client", self.cell.fd, DEADLINE_S)
        self.board = BoardReader(self.session.board_fd, self.cell, *self.node)
        self.arena = ArenaMapping.open(described.shm.path, *self.node)

    def write(self, offset: int, block: Reservation) -> None:
        """Fill a granted place with the block's first byte."""
        self.arena.view(offset, block.length)[:] = block.key[0]

    def put(self, slab: Slab, blocks: Sequence[Reservation], **more: Any) -> tuple[list[Outcome], Slab | None, Slab]:
        """Write to a slab's front and publish; outcomes, the next slab, the rest of this one."""
        at = slab.offset
        for block in blocks:
            self.write(at, block)
            at += aligned(block.length)
        outcomes, following = self.session.put(slab.lease_id, blocks, **more)
        return outcomes, following, Slab(slab.lease_id, at, slab.nbytes - (at - slab.offset))

    def found(self, keys: Sequence[BlockKey], now_ns: int = 1) -> list[bool]:
        """Which are on the board, with the right bytes."""
        answers: list[bool] = []
        for key in keys:
            place = self.board.find_one(key, now_ns)
            answers.append(place is not None)
            if place is not None:
                assert set(self.arena.view(place.offset, place.length)) == {key[0]}
        return answers

    def close(self) -> None:
        self.session.close()
        self.cell.close()
        self.arena.close()


class Host:
    """The node, started with `config`."""

    def __init__(self, config: NodeConfig) -> None:
        self.node = PoolNode(config)
        self.clients: list[Client] = []

    async def __aenter__(self) -> Self:
        await self.node.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        await self.until(lambda: self.node._sessions is None or not len(self.node._sessions))
        if self.node.pool is not None:
            self.node.pool.check()
        await self.node.stop()

    @property
    def pool(self) -> PoolState:
        assert self.node.pool is not None
        return self.node.pool

    @property
    def arena(self) -> Arena:
        assert self.node.arena is not None
        return self.node.arena

    async def describe(self) -> NodeDescription:
        rpc = PoolRpc(self.node.address)
        described = await rpc.describe(DEADLINE_S)
        await rpc.close()
        return described

    async def counters(self) -> dict[str, int]:
        return (await self.describe()).counters

    async def client(self) -> Client:
        made = await asyncio.to_thread(Client, await self.describe())
        self.clients.append(made)
        return made

    async def until(self, condition: Callable[[], Any]) -> None:
        """Let the loop run until something has happened."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)


def config(directory: Path, **more: Any) -> NodeConfig:
    """A small node in `directory`, all by shared memory and gRPC."""
    return NodeConfig(**{"capacity_bytes": 1 << 20, "offers": ("shm", "grpc"), "arena_directory": directory, **more})


def suffixes_in(directory: Path) -> list[str]:
    """Of the files there, sorted."""
    return sorted(os.path.splitext(name)[1] for name in os.listdir(directory))
