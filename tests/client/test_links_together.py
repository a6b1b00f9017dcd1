"""One caller's impatience must not cancel the others: a cancellation nobody asked for ends a request without an answer."""

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from kvpool.block import Namespace
from kvpool.client import AsyncPoolClient, links
from kvpool.client.sources import NodeRef, StaticSource
from kvpool.cluster.config import ClusterConfig
from kvpool.errors import UnavailableError
from kvpool.policy.placement import PlacedNode
from kvpool.testing.node_process import NodeProcess

TOKENS = list(range(16 * 20))


async def test_lookups_that_share_a_slow_connect_all_end_in_a_miss(
    start_node: Callable[..., NodeProcess], namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first to run out of time gives the connection up; the rest must see a failed node, not their own cancellation."""
    node, patience = start_node(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        patience.wait(20)
        raise UnavailableError("too late")

    monkeypatch.setattr(links, "open_reach", slow)
    async with await AsyncPoolClient.open(node.address, namespace) as pool:
        chain = pool.keys(TOKENS)
        limits = [0.2, 0.4, 0.6, 0.8]
        answers = await asyncio.gather(*(pool.lookup(chain, timeout_s=limit) for limit in limits), return_exceptions=True)
        patience.set()
    assert answers == [0, 0, 0, 0]


async def test_lookups_on_a_connection_that_another_gives_up_all_end_in_a_miss(
    start_node: Callable[..., NodeProcess], namespace: Namespace
) -> None:
    """The same for calls that are already under way when the connection is closed."""
    node = start_node()
    async with await AsyncPoolClient.open(node.address, namespace, transport="grpc") as pool:
        chain = pool.keys(TOKENS)
        assert await pool.store(chain, 0, [16] * 20, lambda index, payload: payload.fill(1), deadline_ns=2**62) == 20
        node.signal(signal.SIGSTOP)
        limits = [0.2, 0.4, 0.6, 0.8]
        answers = await asyncio.gather(*(pool.lookup(chain, timeout_s=limit) for limit in limits), return_exceptions=True)
        node.signal(signal.SIGCONT)
    assert answers == [0, 0, 0, 0]


@pytest.mark.parametrize("turns", range(6))
async def test_caller_cancelled_as_the_connection_comes_is_cancelled(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """A loop that is told once to end while it connects must not go on for ever, however few turns of the event loop lie between."""
    opened: asyncio.Future[links.NodeLink] = asyncio.get_running_loop().create_future()

    async def connect(self: links.Links, ref: NodeRef) -> links.NodeLink:
        return await opened

    monkeypatch.setattr(links.Links, "_connect", connect)
    ref = NodeRef(node_id="0" * 32, incarnation=1, address="127.0.0.1:1", placed=PlacedNode("0" * 32))
    caller = asyncio.create_task(links.Links(StaticSource([ref.address], ClusterConfig()), "auto").link(ref, 5))
    await asyncio.sleep(0.01)
    opened.set_result(links.NodeLink(node=ref, rpc=Mock(), reach=Mock()))
    for _ in range(turns):
        await asyncio.sleep(0)
    cancelled = caller.cancel()
    await asyncio.wait([caller], timeout=5)
    assert caller.cancelled() == cancelled
