"""Copying stored frames from node to node: what is sent, what is told, and that nothing damaged is handed on."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvpool.block import BlockKey, Framer, Namespace
from kvpool.client.choose import open_reach
from kvpool.client.frames import Bytes, Frame, batches, fetch, push
from kvpool.client.links import NodeLink
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import Stages
from kvpool.errors import UnavailableError
from kvpool.policy.placement import PlacedNode
from kvpool.request.pool import NEAR, Stored
from kvpool.testing.node_process import NodeProcess
from kvpool.units import SECOND
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc

LIMIT_S = 10.0


@asynccontextmanager
async def linked(process: NodeProcess, transport: str) -> AsyncIterator[NodeLink]:
    """A link to a node, as `Links` opens it."""
    probe = PoolRpc(process.address)
    described = await probe.describe(LIMIT_S)
    await probe.close()
    ref = NodeRef(
        node_id=described.node_id, incarnation=described.incarnation, address=process.address, placed=PlacedNode(described.node_id)
    )
    rpc = PoolRpc(process.address, NodeIdentity(described.node_id, described.incarnation))
    reach = open_reach(described, process.address, transport)
    try:
        yield NodeLink(node=ref, rpc=rpc, reach=reach)
    finally:
        reach.close()
        await rpc.close()


class Keeper:
    """Somebody who keeps frames: of a chain of a namespace, in its memory."""

    def __init__(self, namespace: Namespace, name: str, count: int) -> None:
        self.framer = Framer(namespace)
        self.keys = [BlockKey(name.encode().ljust(31, b".") + bytes([index])) for index in range(count)]
        self.length = self.framer.frame_bytes(16)
        self.frames: dict[BlockKey, Bytes] = {}
        for index, key in enumerate(self.keys):
            frame = np.full(self.length, index + 1, np.uint8)
            self.framer.stamp(frame, key, self.keys[index - 1] if index else self.framer.root, 16)
            self.frames[key] = frame
        self.threads = ThreadPoolExecutor(1)

    def listed(self, **more: object) -> list[Frame]:
        return [
            Frame(key, Stored(0, self.length, self.keys[index - 1] if index else b"", 16 * index, **more))  # type: ignore[arg-type]
            for index, key in enumerate(self.keys)
        ]

    def fill(self, wanted: Sequence[tuple[Frame, Bytes]]) -> list[bool]:
        for frame, buffer in wanted:
            if frame.key in self.frames:
                buffer[:] = self.frames[frame.key]
        return [frame.key in self.frames for frame, _ in wanted]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_pushed_frames_are_there_with_all_that_belongs_to_them(node: NodeProcess, namespace: Namespace, transport: str) -> None:
    """Ttl, tenant, priority, place in the chain: another node must be able to say the same of them."""
    keeper = Keeper(namespace, f"there-{transport}", 5)
    frames = keeper.listed(ttl_ms=60_000, sequence=80, tenant="t", priority=70, priority_ms=50_000)
    async with linked(node, transport) as link:
        pushed = await push(link, frames, keeper.fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon())
        assert [frame.key for frame in pushed.written] == keeper.keys
        assert pushed.nbytes == 5 * keeper.length
        again = await push(link, frames, keeper.fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon())
        assert (len(again.there), again.written) == (5, [])
        lease_id, told = await link.rpc.acquire_stored("me", 10_000, keeper.keys, LIMIT_S)
        for index, block in enumerate(told):
            assert block is not None
            assert (block.parent, block.depth, block.length) == (keeper.keys[index - 1] if index else b"", 16 * index, keeper.length)
            assert (block.sequence, block.tenant, block.priority) == (80, "t", 70)
            assert 0 < block.ttl_ms <= 60_000
            assert 0 < block.priority_ms <= 50_000
        await link.rpc.release(lease_id, (), LIMIT_S)


async def test_damaged_and_missing_frames_stay_behind(node: NodeProcess, namespace: Namespace) -> None:
    """One bad frame neither spreads nor stops the others; the reservation for it is given back."""
    keeper = Keeper(namespace, "damaged", 4)
    keeper.frames[keeper.keys[1]][-1] ^= 1
    del keeper.frames[keeper.keys[2]]
    async with linked(node, "shm") as link:
        pushed = await push(link, keeper.listed(), keeper.fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon())
        assert [frame.key for frame in pushed.written] == [keeper.keys[0], keeper.keys[3]]
        assert [frame.key for frame in pushed.unsound] == keeper.keys[1:3]
        assert await link.rpc.lookup(keeper.keys, LIMIT_S) == b"\1\0\0\1"
        assert (await link.rpc.describe(LIMIT_S)).write_leases == 0


async def test_near_pushes_are_told_from_the_pools_own_and_full_nodes_refuse(
    start_node: Callable[..., NodeProcess], namespace: Namespace
) -> None:
    """A near copy must not pass for one that the pool counts on; no room is an answer."""
    keeper = Keeper(namespace, "near", 3)
    async with linked(start_node("--capacity", "20KiB"), "shm") as link:
        pushed = await push(
            link, keeper.listed()[:1], keeper.fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon(), near=True
        )
        assert len(pushed.written) == 1
        assert await link.rpc.lookup(keeper.keys[:1], LIMIT_S) == bytes([NEAR])
        own = await push(link, keeper.listed()[:1], keeper.fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon())
        assert len(own.there) == 1
        assert await link.rpc.lookup(keeper.keys[:1], LIMIT_S) == b"\1"
        lease_id, _ = await link.rpc.acquire("holder", 10_000, keeper.keys[:1], LIMIT_S)
        rest = await push(link, keeper.listed()[1:], keeper.fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon())
        assert len(rest.refused) == 2 - len(rest.written) > 0
        await link.rpc.release(lease_id, (), LIMIT_S)


async def test_fetched_frames_are_checked_on_arrival_and_only_found_ones_get_room(node: NodeProcess, namespace: Namespace) -> None:
    """What a node keeps of others it has seen to be whole."""
    keeper = Keeper(namespace, "fetched", 3)
    stranger = BlockKey(b"?" * 32)
    arena = np.zeros(1 << 20, np.uint8)
    asked: list[list[BlockKey]] = []

    async def settle(frames: Sequence[Frame]) -> tuple[int, list[int | None]]:
        asked.append([frame.key for frame in frames])
        return 7, [None if index == 1 else 65_536 * (index + 1) for index in range(len(frames))]

    async with linked(node, "shm") as link:
        await push(link, keeper.listed(), keeper.fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon())
        wanted = [*keeper.keys, stranger]
        lease_id, frames = await fetch(link, wanted, settle, arena, owner="me", threads=keeper.threads, deadline_ns=_soon())
        assert (lease_id, asked) == (7, [keeper.keys])
        assert [frame.key for frame in frames] == [keeper.keys[0], keeper.keys[2]]
        assert np.array_equal(arena[65_536 : 65_536 + keeper.length], keeper.frames[keeper.keys[0]])
        assert (await link.rpc.describe(LIMIT_S)).read_leases == 0
        assert await fetch(link, [stranger], settle, arena, owner="me", threads=keeper.threads, deadline_ns=_soon()) == (0, [])


async def test_copy_whose_lease_ended_meanwhile_is_a_failure_of_the_other_side(
    node: NodeProcess, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stood still for longer than a lease must be told so in a way that ends one batch, not all that it is doing."""
    keeper = Keeper(namespace, "late", 2)
    async with linked(node, "grpc") as link:

        def losing(call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
            async def answered(*arguments: Any, **more: Any) -> Any:
                answer = await call(*arguments, **more)
                await link.rpc.release(answer[0], (), LIMIT_S)
                return answer

            return answered

        async def settle(frames: Sequence[Frame]) -> tuple[int, list[int | None]]:
            return 0, [index * keeper.length for index in range(len(frames))]

        more = {"owner": "me", "threads": keeper.threads, "deadline_ns": _soon()}
        with monkeypatch.context() as patch:
            patch.setattr(link.rpc, "reserve", losing(link.rpc.reserve))
            with pytest.raises(UnavailableError, match="lease ended"):
                await push(link, keeper.listed(), keeper.fill, stages=Stages(0), **more)  # type: ignore[arg-type]
        await push(link, keeper.listed(), keeper.fill, stages=Stages(0), **more)  # type: ignore[arg-type]
        monkeypatch.setattr(link.rpc, "acquire_stored", losing(link.rpc.acquire_stored))
        with pytest.raises(UnavailableError, match="lease ended"):
            await fetch(link, keeper.keys, settle, np.empty(2 * keeper.length, np.uint8), **more)  # type: ignore[arg-type]


async def test_cancelled_push_leaves_no_reservation(node: NodeProcess, namespace: Namespace) -> None:
    """A node that stops in the middle must not keep others' memory."""
    keeper = Keeper(namespace, "cancelled", 2)
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def fill(wanted: Sequence[tuple[Frame, Bytes]]) -> list[bool]:
        loop.call_soon_threadsafe(started.set)
        return keeper.fill(wanted)

    async with linked(node, "shm") as link:
        task = asyncio.create_task(
            push(link, keeper.listed(), fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon())
        )
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await link.rpc.describe(LIMIT_S)).write_leases == 0


def test_batches_are_of_one_kind_bounded_and_keep_chains_in_order() -> None:
    """One reservation is of one tenant and sequence; heads go before tails."""

    def frame(index: int, tenant: str, sequence: int, length: int = 10) -> Frame:
        return Frame(BlockKey(bytes([index]) * 32), Stored(0, length, b"", 0, sequence=sequence, tenant=tenant))

    mixed = [frame(0, "b", 1), frame(1, "a", 1), frame(2, "b", 1), frame(3, "a", 2), frame(4, "b", 1), frame(5, "b", 1, 99)]
    cut = [[frame.key[0] for frame in batch] for batch in batches(mixed, 25)]
    assert cut == [[1], [3], [0, 2], [4], [5]]
    assert list(batches([])) == []


def _soon() -> int:
    return time.monotonic_ns() + 10 * SECOND


async def test_lease_of_a_failed_push_over_a_network_runs_out(
    node: NodeProcess, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may still be on the way."""
    keeper = Keeper(namespace, "lost", 2)
    released: list[int] = []

    async def noted(lease_id: int, *args: Any) -> None:
        released.append(lease_id)

    def lost(*args: Any, **options: Any) -> None:
        raise UnavailableError("cut off")

    async with linked(node, "grpc") as link:
        monkeypatch.setattr(link.reach, "name", "tcp", raising=False)
        monkeypatch.setattr(link.reach, "write", lost)
        with monkeypatch.context() as patch:
            patch.setattr(link.rpc, "release", noted)
            with pytest.raises(UnavailableError, match="cut off"):
                await push(link, keeper.listed(), keeper.fill, owner="me", stages=Stages(0), threads=keeper.threads, deadline_ns=_soon())
        assert released == []
