"""Reading by key from nodes elsewhere, over TCP: one message a node, checked in full, and nothing lost when it fails."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import BlockKey, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.errors import UnavailableError
from kvpool.testing.node_process import NodeProcess
from kvpool.transport.tcp import TcpReach
from kvpool.units import SECOND
from kvpool.wire.pool_client import PoolRpc

Payload = npt.NDArray[np.uint8]
BLOCKS = 6 * 32
TOKENS = list(range(16 * BLOCKS))
COUNTS = [16] * BLOCKS


def soon(seconds: float = 30.0) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


def content(index: int, nbytes: int) -> Payload:
    return np.random.default_rng(index).integers(0, 256, nbytes, dtype=np.uint8)


def fill(index: int, payload: Payload) -> None:
    payload[:] = content(index, payload.nbytes)


def rows() -> list[Payload]:
    return [np.zeros(512 * 16, np.uint8) for _ in range(BLOCKS)]


def right(some: list[Payload]) -> list[bool]:
    return [bool(np.array_equal(row, content(index, row.nbytes))) for index, row in enumerate(some)]


@pytest.fixture
def nodes(start_node: Callable[..., NodeProcess]) -> list[NodeProcess]:
    """Two nodes that share every chain of more than an extent."""
    return [start_node("--id", f"{i:032x}", "--offer", "shm,tcp,grpc") for i in (1, 2)]


@pytest.fixture
async def pool(nodes: list[NodeProcess], namespace: Namespace) -> AsyncIterator[AsyncPoolClient]:
    source = ",".join(node.address for node in nodes)
    async with await AsyncPoolClient.open(source, namespace, transport="tcp") as made:
        assert await made.connect() == []
        yield made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of nodes, by gRPC or by TCP."""
    made: list[str] = []
    for owner, name in ((PoolRpc, "lookup"), (PoolRpc, "acquire"), (TcpReach, "get"), (TcpReach, "probe")):
        real = getattr(owner, name)

        def noted(self: Any, *args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            made.append(name)
            return real(self, *args, **options)

        monkeypatch.setattr(owner, name, noted)
    return made


async def stored(pool: AsyncPoolClient) -> list[BlockKey]:
    chain = pool.keys(TOKENS)
    assert await pool.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    return chain


async def test_one_message_a_node_brings_all_blocks(pool: AsyncPoolClient, calls: list[str]) -> None:
    """Into the caller's arrays, to a sink in order, and for a look-up."""
    chain = await stored(pool)
    some, seen = rows(), list[int]()
    assert await pool.load_into(chain, 0, some, deadline_ns=soon()) == BLOCKS
    assert all(right(some))
    assert calls == ["get", "get"]

    def sink(index: int, payload: Payload) -> None:
        assert np.array_equal(payload, content(index, payload.nbytes))
        seen.append(index)

    assert await pool.load(chain, 5, COUNTS[5:], sink, deadline_ns=soon()) == BLOCKS - 5
    assert seen == list(range(5, BLOCKS))
    calls.clear()
    assert await pool.lookup(chain) == BLOCKS
    assert calls == ["probe", "probe"]
    assert set(pool.reaches().values()) == {"tcp"}


async def test_board_here_and_nodes_elsewhere_deliver_together(
    nodes: list[NodeProcess], namespace: Namespace, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """A chain on a node of this host and on another one: each block by its shortest way, in order for a sink."""
    source = ",".join(node.address for node in nodes)
    async with await AsyncPoolClient.open(source, namespace, transport="tcp") as writer:
        chain = await stored(writer)
    async with await AsyncPoolClient.open(source, namespace) as pool:
        refs = pool._core.links.nodes()
        await pool._core.links.link(refs[0], 5)
        monkeypatch.setattr(pool._core.links, "_transport", "tcp")
        await pool._core.links.link(refs[1], 5)
        assert sorted(pool.reaches().values()) == ["shm", "tcp"]
        calls.clear()
        some, seen = rows(), list[int]()
        assert await pool.load_into(chain, 0, some, deadline_ns=soon()) == BLOCKS
        assert all(right(some))
        assert calls == ["get"]

        def sink(index: int, payload: Payload) -> None:
            assert np.array_equal(payload, content(index, payload.nbytes))
            seen.append(index)

        assert await pool.load(chain, 0, COUNTS, sink, deadline_ns=soon()) == BLOCKS
        assert seen == list(range(BLOCKS))
        assert "acquire" not in calls
        assert await pool.lookup(chain) == BLOCKS
        assert "lookup" not in calls


async def test_wrong_byte_from_the_wire_is_never_delivered(pool: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and payloads are checked; what is damaged is asked for again under a lease."""
    chain = await stored(pool)
    real, dice = TcpReach.get, np.random.default_rng(3)

    def damaging(self: TcpReach, wants: Any, deadline_ns: int, check: Callable[[int], bool]) -> list[bool]:
        def damaged(number: int) -> bool:
            if number % 3 == 0:
                part = wants[number][2 + dice.integers(2)]
                part[dice.integers(part.size)] ^= 1 << dice.integers(8)
            return check(number)

        return real(self, wants, deadline_ns, damaged)

    monkeypatch.setattr(TcpReach, "get", damaging)
    for _ in range(5):
        some = rows()
        assert await pool.load_into(chain, 0, some, deadline_ns=soon()) == BLOCKS
        assert all(right(some))
    assert pool.direct()["hits"] < 5 * BLOCKS


async def test_tcp_that_fails_costs_no_block(pool: AsyncPoolClient, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The leases' way is gone too, as it is the same reach, so the next call connects anew."""
    chain = await stored(pool)
    real, left = TcpReach.get, [1]

    def failing(self: TcpReach, *args: Any) -> list[bool]:
        if left[0]:
            left[0] -= 1
            raise UnavailableError("cut")
        return real(self, *args)

    monkeypatch.setattr(TcpReach, "get", failing)
    async with asyncio.timeout(30):
        while await pool.load_into(chain, 0, some := rows(), deadline_ns=soon()) < BLOCKS:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert all(right(some))
    assert left == [0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_node_that_dies_or_freezes_ends_in_a_shorter_prefix(
    nodes: list[NodeProcess], pool: AsyncPoolClient, number: signal.Signals
) -> None:
    """Within the deadline, and what the other one has still counts where it leads."""
    chain = await stored(pool)
    holders = {placed.targets[0] for placed in pool._core.placed(chain, 0, 1)[0]}
    victim = next(node for node in nodes if node.node_id not in holders)
    victim.signal(number)
    began, some = time.monotonic(), rows()
    got = await pool.load_into(chain, 0, some, deadline_ns=soon(1.5))
    assert time.monotonic() - began < 10
    assert got > 0
    assert all(right(some)[:got])
