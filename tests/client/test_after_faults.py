"""What a fault leaves behind: no lease, no closed door, no error that isn't the caller's."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool.block import BlockKey, Namespace
from kvpool.client import AsyncPoolClient, asking, choose, leasing, links, pool, transfer
from kvpool.client.links import NodeLink
from kvpool.client.sdk import connect_async
from kvpool.client.sources import MembershipSource
from kvpool.cluster import open_membership
from kvpool.errors import ClosedError, ConfigError, DeadlineError, KvpoolError, UnavailableError
from kvpool.request import Scope
from kvpool.testing.membership_kit import until
from kvpool.testing.pool_cluster import PoolCluster, Spot
from kvpool.units import SECOND
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.pool_data import PoolData

Payload = npt.NDArray[np.uint8]
BLOCKS = 32
COUNTS = [16] * BLOCKS
TOKENS = list(range(16 * BLOCKS))
WINDOW = 70_000
"""Bytes of a window of eight blocks."""


def soon(seconds: float = 60.0) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


def fill(index: int, payload: Payload) -> None:
    payload[:] = index + 1


class Sink(list[int]):
    """The indices that came, each with the right bytes."""

    def __call__(self, index: int, payload: Payload) -> None:
        assert (payload == index + 1).all()
        self.append(index)


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PoolCluster]:
    """Leases outlive every test, so one that isn't given back is seen; bytes go by small windows over gRPC."""
    monkeypatch.setattr(leasing, "BASE_MS", 600_000)
    monkeypatch.setattr(transfer, "WINDOW_BYTES", WINDOW)
    monkeypatch.setattr(choose, "REACHES", ("ucx", "grpc"))
    made = PoolCluster(tmp_path)
    yield made
    await made.stop()


@pytest.fixture
async def spot(cluster: PoolCluster) -> Spot:
    return await cluster.add()


@pytest.fixture
async def client(cluster: PoolCluster, spot: Spot, namespace: Namespace) -> AsyncIterator[AsyncPoolClient]:
    async with await AsyncPoolClient.open(cluster.membership, namespace) as made:
        yield made


async def stored(client: AsyncPoolClient) -> list[BlockKey]:
    chain = client.keys(TOKENS)
    assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    return chain


async def no_leases(spot: Spot) -> None:
    async with asyncio.timeout(20):
        while (books := await spot.describe()).read_leases or books.write_leases or books.pinned_bytes:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def failing(monkeypatch: pytest.MonkeyPatch, way: str, *calls: int) -> None:
    """Let the transfers of these numbers, from 0 on, lose their connection."""
    real, made = getattr(PoolData, way), iter(range(1_000_000))

    def moved(self: PoolData, *args: Any) -> None:
        if next(made) in calls:
            raise UnavailableError("the stream broke")
        real(self, *args)

    monkeypatch.setattr(PoolData, way, moved)


async def test_lease_that_ends_amid_a_load_is_a_shorter_prefix(
    client: AsyncPoolClient, spot: Spot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node refuses the bytes then; that is no mistake of the caller."""
    chain, leases, loop, sink = await stored(client), list[int](), asyncio.get_running_loop(), Sink()
    real = PoolRpc.acquire

    async def noted(self: PoolRpc, *args: Any, **options: Any) -> Any:
        answer = await real(self, *args, **options)
        leases.append(answer[0])
        return answer

    async def end() -> None:
        about = await spot.describe()
        rpc = PoolRpc(spot.node.address, NodeIdentity(about.node_id, about.incarnation))
        await rpc.release(leases[0], (), 5)
        await rpc.close()

    def ends(index: int, payload: Payload) -> None:
        sink(index, payload)
        if index == 0:
            asyncio.run_coroutine_threadsafe(end(), loop).result(10)

    monkeypatch.setattr(PoolRpc, "acquire", noted)
    delivered = await client.load(chain, 0, COUNTS, ends, deadline_ns=soon())
    assert 0 < delivered < BLOCKS
    assert sink == list(range(delivered))
    assert client._core.links.health.ill() == []
    assert await client.load(chain, 0, COUNTS, again := Sink(), deadline_ns=soon()) == BLOCKS
    assert again == list(range(BLOCKS))
    await no_leases(spot)


async def test_only_way_to_a_node_is_tried_again_after_it_broke_once(
    client: AsyncPoolClient, spot: Spot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reach that failed is passed over for another one, not for none."""
    chain = await stored(client)
    failing(monkeypatch, "read", 1)
    delivered = await client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon())
    assert 0 < delivered < BLOCKS
    assert await client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon()) == BLOCKS
    await no_leases(spot)


async def test_only_way_that_keeps_breaking_makes_its_node_rest(client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a node that grants every lease and delivers nothing would be asked for ever."""
    chain = await stored(client)
    failing(monkeypatch, "read", *range(1_000))
    (ref,) = client._core.links.nodes()
    async with asyncio.timeout(20):
        while not client._core.links.resting(ref):
            assert await client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon()) == 0


@pytest.mark.parametrize("calls", [(0,), (1,), range(1_000)])
async def test_failed_load_gives_its_leases_back(
    client: AsyncPoolClient, spot: Spot, monkeypatch: pytest.MonkeyPatch, calls: tuple[int, ...]
) -> None:
    """Also when the connection that it was granted on is closed by then."""
    chain = await stored(client)
    failing(monkeypatch, "read", *calls)
    assert await client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon()) < BLOCKS
    await no_leases(spot)


async def test_failed_store_gives_its_leases_back_and_publishes_what_is_whole(
    client: AsyncPoolClient, spot: Spot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later window that fails takes nothing from those before it, and what is missing can be stored at once."""
    chain = client.keys(TOKENS)
    failing(monkeypatch, "write", 2)
    held = await client.store(chain, 0, COUNTS, fill, deadline_ns=soon())
    assert 0 < held < BLOCKS
    assert await spot.holds(chain) == [j < held for j in range(BLOCKS)]
    await no_leases(spot)
    assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert await client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon()) == BLOCKS


async def test_local_trouble_with_a_connection_ends_with_its_cause(client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that could not be read for a moment must not be remembered for ever."""
    monkeypatch.setattr(links, "open_reach", trouble := Trouble(1))
    chain = client.keys(TOKENS)
    with pytest.raises(ConfigError):
        await client.lookup(chain)
    assert await client.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert trouble.left == 0


class Trouble:
    """`open_reach` that can't at first."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.left:
            self.left -= 1
            raise ConfigError("can't read ca.pem")
        return choose.open_reach(*args, **options)


async def test_local_trouble_does_not_end_the_probes(
    cluster: PoolCluster, spot: Spot, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that are ill come back by probes only, so whoever probes must go on."""
    monkeypatch.setattr(pool, "_TEND_S", 0.02)
    monkeypatch.setattr(links, "open_reach", trouble := Trouble(3))
    async with await AsyncPoolClient.open(cluster.membership, namespace, eager=True) as client:
        async with asyncio.timeout(20):
            while not client.reaches():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert trouble.left == 0


async def test_load_that_a_close_overtakes_says_so(client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that some pool of threads can't take work, and a tenant's view is closed with its client."""
    chain, view = await stored(client), client.scoped(Scope())
    real, asked, go_on = PoolRpc.acquire, asyncio.Event(), asyncio.Event()

    async def held_up(self: PoolRpc, *args: Any, **options: Any) -> Any:
        answer = await real(self, *args, **options)
        asked.set()
        await go_on.wait()
        return answer

    monkeypatch.setattr(PoolRpc, "acquire", held_up)
    work = asyncio.create_task(client.load(chain, 0, COUNTS, Sink(), deadline_ns=soon()))
    await asked.wait()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(ClosedError):
        await work
    await closing
    with pytest.raises(ClosedError):
        await view.load(chain, 0, COUNTS, Sink(), deadline_ns=soon())


async def test_call_on_a_connection_that_was_given_up_takes_no_other_with_it(client: AsyncPoolClient) -> None:
    """Many calls share a connection: when it breaks, each of them fails, but it is one failure."""
    await stored(client)
    core = client._core
    (ref,) = core.links.nodes()
    fresh: list[NodeLink] = []

    async def breaks(link: NodeLink, timeout_s: float) -> asking.Answer:
        await core.links.failed(ref, "data", reach="ucx")  # another call's bytes broke
        fresh.append(await core.links.link(ref, 5))
        raise UnavailableError("closed during the call")

    assert await asking.call(core, ref, [0], breaks, 5).task is None
    assert await core.links.link(ref, 5) is fresh[0]
    assert not core.links.resting(ref)


async def test_reach_that_is_opened_too_late_is_closed(client: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread can't be cancelled: what it opens for nobody must not stay open."""
    patience, closed = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        patience.wait(20)
        return SimpleNamespace(name="grpc", close=closed.set)

    monkeypatch.setattr(links, "open_reach", slow)
    (ref,) = client._core.links.nodes()
    work = asyncio.create_task(client._core.links.link(ref, 10))
    await asyncio.sleep(0.3)
    await client._core.links.failed(ref)
    patience.set()
    with pytest.raises(UnavailableError):
        await work
    assert await asyncio.to_thread(closed.wait, 20)


async def test_client_that_can_not_be_opened_leaves_nothing(spot: Spot, namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gets an error has nothing to close."""
    closed: list[AsyncPoolClient] = []
    real = AsyncPoolClient.close

    async def close(self: AsyncPoolClient) -> None:
        closed.append(self)
        await real(self)

    async def connect(self: AsyncPoolClient) -> list[str]:
        raise ConfigError("can't")

    monkeypatch.setattr(AsyncPoolClient, "close", close)
    monkeypatch.setattr(AsyncPoolClient, "connect", connect)
    with pytest.raises(ConfigError):
        await connect_async(spot.node.address, namespace=namespace, transport="grpc")
    assert len(closed) == 1


@pytest.mark.parametrize("cancels", [1, 3])
async def test_cancelled_load_waits_for_its_thread_however_often(client: AsyncPoolClient, spot: Spot, cancels: int) -> None:
    """The thread writes into the caller's memory: a second cancellation must not let go of it."""
    chain, began, go_on, over = await stored(client), threading.Event(), threading.Event(), threading.Event()

    def slow(index: int, payload: Payload) -> None:
        began.set()
        go_on.wait(20)
        if index == 7:
            over.set()

    work = asyncio.create_task(client.load(chain, 0, COUNTS, slow, deadline_ns=soon()))
    await asyncio.to_thread(began.wait, 20)
    for _ in range(cancels):
        work.cancel()
        await asyncio.sleep(0.01)
    assert not work.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert over.is_set()
    await no_leases(spot)


async def test_node_that_is_slow_to_greet_is_waited_for(client: AsyncPoolClient, spot: Spot) -> None:
    """A busy node, or one at the other end of the country, takes longer than a moment to set up a connection."""
    spot.relay.freeze()
    chain = client.keys(TOKENS)
    work = asyncio.create_task(client.store(chain, 0, COUNTS, fill, deadline_ns=soon()))
    await asyncio.sleep(0.4)
    spot.relay.mend()
    assert await work == BLOCKS


@pytest.mark.parametrize("info", [{}, {"incarnation": "x"}])
async def test_member_that_does_not_say_its_life_is_passed_over(info: dict[str, str]) -> None:
    """Nobody could call it; the others are there all the same."""
    membership = open_membership("memory://passed-over")
    membership.join(role="node", address="127.0.0.1:1", id="a" * 32, info=info)
    membership.join(role="node", address="127.0.0.1:2", id="b" * 32, info={"incarnation": "7"})
    until(membership, lambda view: len(view) == 2)
    source = MembershipSource(membership, owned=True)
    assert [(ref.node_id, ref.incarnation) for ref in source.nodes()] == [("b" * 32, 7)]
    await source.close()


@pytest.mark.parametrize("error", [UnavailableError("cut off"), DeadlineError("too late")])
async def test_lease_of_a_failed_write_over_a_network_runs_out(
    client: AsyncPoolClient, spot: Spot, monkeypatch: pytest.MonkeyPatch, error: KvpoolError
) -> None:
    """Its bytes may still be on the way: a release would say that they have all arrived, and give their places to others."""
    assert await client.connect() == []
    (link,) = [link for _, link in client._core.links._ready()]
    released: list[int] = []
    real = PoolRpc.release

    async def noted(self: PoolRpc, lease_id: int, *args: Any, **options: Any) -> None:
        released.append(lease_id)
        await real(self, lease_id, *args, **options)

    def lost(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(PoolRpc, "release", noted)
    monkeypatch.setattr(link.reach, "name", "tcp", raising=False)
    monkeypatch.setattr(link.reach, "write", lost)
    assert await client.store(client.keys(TOKENS), 0, COUNTS, fill, deadline_ns=soon()) == 0
    await client._core.background.finish(10)
    assert released == []
    assert (await spot.describe()).write_leases == 1
