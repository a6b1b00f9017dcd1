"""Puts on a node of the same host: slabs for small ones, reserve and commit for large ones, and gRPC where neither goes."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpool
from kvpool.block import Namespace
from kvpool.client import AsyncPoolClient, Client, putting
from kvpool.client.here import Limits
from kvpool.client.local import LocalReach
from kvpool.client.putting import copying, put_here
from kvpool.client.writing import Wish, batch_of
from kvpool.errors import DeadlineError, KvpoolError, UnavailableError
from kvpool.pool.allocator import aligned
from kvpool.request.pool import NodeDescription
from kvpool.testing.node_process import NodeProcess, poll
from kvpool.units import MIB, SECOND
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.session_client import Session

ROW = 512 * 16
"""Bytes of a block."""


def rows_of(count: int, seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, ROW), dtype=np.uint8)


def tokens_of(count: int, seed: int) -> list[int]:
    return [seed, *range(16 * count - 1)]


def describe(node: NodeProcess) -> NodeDescription:
    async def ask() -> NodeDescription:
        rpc = PoolRpc(node.address)
        try:
            return await rpc.describe(5)
        finally:
            await rpc.close()

    return asyncio.run(ask())


def local(pool: Client) -> LocalReach:
    (reach,) = pool._client.pool._core.links.locals
    return reach


def holds(pool: Client, tokens: list[int], rows: npt.NDArray[np.uint8]) -> bool:
    out = np.zeros_like(rows)
    return pool.get(tokens, out).tokens == len(tokens) // 16 * 16 and np.array_equal(out, rows)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls over sessions."""
    made: list[str] = []
    for name in ("slab", "put", "reserve", "commit", "release"):
        real = getattr(Session, name)

        def noted(self: Session, *args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            made.append(name)
            return real(self, *args, **options)

        monkeypatch.setattr(Session, name, noted)
    return made


@pytest.fixture
def pool(node: NodeProcess, namespace: Namespace) -> Iterator[Client]:
    with kvpool.connect(node.address, namespace=namespace) as made:
        assert made._run(made._client.pool.connect()) == []
        yield made


def test_small_puts_share_a_slab(pool: Client, sent: list[str]) -> None:
    """One message each, and one more for the first."""
    for seed in range(10):
        assert pool.put(tokens_of(2, seed), rows_of(2, seed)) == 32
    assert sent == ["slab"] + ["put"] * 10
    for seed in range(10):
        assert holds(pool, tokens_of(2, seed), rows_of(2, seed))


def test_slab_that_runs_out_is_followed_by_the_next(pool: Client, sent: list[str]) -> None:
    """It comes with an answer, so no put waits for one; what is left of the old one goes back."""
    for seed in range(100):
        assert pool.put(tokens_of(4, seed), rows_of(4, seed)) == 64
    assert sent.count("slab") == 1
    assert sent.count("put") == 100
    assert sent.count("release") >= 3
    for seed in range(100):
        assert holds(pool, tokens_of(4, seed), rows_of(4, seed))


def test_large_puts_are_reserved_and_committed(pool: Client, sent: list[str]) -> None:
    """Straight into their places."""
    assert pool.put(tokens_of(100, 1), rows_of(100, 1)) == 1600
    assert sent == ["reserve", "commit"]
    assert holds(pool, tokens_of(100, 1), rows_of(100, 1))


def test_more_blocks_than_a_message_takes(pool: Client, sent: list[str]) -> None:
    """1,024 a message."""
    assert pool.put(tokens_of(1500, 1), rows_of(1500, 1)) == 16 * 1500
    assert sent == ["reserve", "commit"] * 2
    assert holds(pool, tokens_of(1500, 1), rows_of(1500, 1))


@pytest.mark.parametrize("count", [2, 100])
def test_blocks_that_exist_stay_as_they_are(pool: Client, count: int) -> None:
    """A put is of use for those that are missing only."""
    tokens, rows = tokens_of(count, 7), rows_of(count, 7)
    assert pool.put(tokens[: 16 * (count - 1)], rows[:-1]) == 16 * (count - 1)
    other = rows.copy()
    other[:-1] = 0
    assert pool.put(tokens, other) == 16 * count
    assert holds(pool, tokens, rows)


def test_idle_slab_goes_back(node: NodeProcess, pool: Client) -> None:
    """A client that has written once pins nothing for ever."""
    assert pool.put(tokens_of(1, 3), rows_of(1, 3)) == 16
    assert describe(node).pinned_bytes > 0

    def unpinned() -> bool:
        books = describe(node)
        return (books.pinned_bytes, books.write_leases) == (0, 0)

    poll(unpinned, "the slab stays")
    assert pool.put(tokens_of(1, 4), rows_of(1, 4)) == 16
    assert holds(pool, tokens_of(1, 4), rows_of(1, 4))


@pytest.mark.parametrize("count", [2, 100])
@pytest.mark.parametrize("name", ["put", "reserve", "commit"])
def test_session_that_fails_costs_no_put(pool: Client, monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    """gRPC does it then, and what had been granted goes back."""

    def broken(self: Session, *args: Any, **options: Any) -> Any:
        raise UnavailableError("the session is broken")

    monkeypatch.setattr(Session, name, broken)
    assert pool.put(tokens_of(count, 1), rows_of(count, 1)) == 16 * count
    assert holds(pool, tokens_of(count, 1), rows_of(count, 1))


@pytest.mark.parametrize("count", [1, 24])
def test_put_without_room_waits_by_grpc_or_is_short(
    start_node: Callable[..., NodeProcess], namespace: Namespace, sent: list[str], count: int
) -> None:
    """Blocks that are looked at can't be evicted: a full node takes nothing, says so, and takes it once there is room."""
    node = start_node("--capacity", "4MiB")
    with kvpool.connect(node.address, namespace=namespace, timeout_s=3) as pool:
        full = 4 * MIB // aligned(pool._client.pool._core.framer.frame_bytes(16))
        assert pool.put(tokens_of(full, 1), rows_of(full, 1)) == 16 * full
        with pool.view(tokens_of(full, 1)) as view:
            assert view.tokens == 16 * full
            sent.clear()
            assert pool.put(tokens_of(count, 2), rows_of(count, 2)) == 0
            assert sent[:2] == (["slab", "reserve"] if count == 1 else ["reserve", "reserve"])
        assert pool.put(tokens_of(count, 2), rows_of(count, 2)) == 16 * count
        assert holds(pool, tokens_of(count, 2), rows_of(count, 2))


def test_put_from_many_threads_never_mixes_bytes(pool: Client) -> None:
    """Each has a slab of its own while it writes."""
    failures: list[str] = []

    def work(number: int) -> None:
        for turn in range(30):
            seed = 1000 * number + turn
            count = 1 + turn % 40
            if pool.put(tokens_of(count, seed), rows_of(count, seed)) != 16 * count:
                failures.append(f"{seed} not held")
            if not holds(pool, tokens_of(count, seed), rows_of(count, seed)):
                failures.append(f"{seed} wrong")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


@pytest.mark.parametrize("where", ["slab", "lease"])
async def test_close_waits_for_a_writer_with_the_sessions_end(node: NodeProcess, namespace: Namespace, where: str) -> None:
    """The node gives granted bytes away when the socket ends, so it ends after the last writer, however early the client is closed."""
    async with await AsyncPoolClient.open(node.address, namespace, transport="shm") as pool:
        assert await pool.connect() == []
        (reach,) = pool._core.links.locals
        assert reach.session is not None
        began, go_on, alive = threading.Event(), threading.Event(), list[bool]()

        def slow(index: int, payload: Any) -> None:
            began.set()
            go_on.wait(20)
            assert reach.session is not None
            alive.append(reach.session.alive)
            payload[:] = 1

        chain = pool.keys(tokens_of(1 if where == "slab" else 20, 5))
        work = asyncio.create_task(pool.store(chain, 0, [16] * len(chain), slow, deadline_ns=time.monotonic_ns() + 20 * SECOND))
        assert await asyncio.to_thread(began.wait, 20)
        closing = asyncio.create_task(pool.close())
        await asyncio.sleep(0.2)
        go_on.set()
        await closing
        with_error = await asyncio.gather(work, return_exceptions=True)
        assert all(isinstance(one, int | KvpoolError) for one in with_error)
        assert alive[0]
        assert not reach.session.alive


@pytest.fixture
def offsets(pool: Client, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where in the arena frames were written."""
    written: list[int] = []
    real, memory = putting._frame, local(pool).memory

    def noted(frame: Any, batch: Any, j: int) -> None:
        written.append(frame.ctypes.data - memory.ctypes.data)
        real(frame, batch, j)

    monkeypatch.setattr(putting, "_frame", noted)
    return written


def nearby_put(pool: Client, seed: int) -> bool:
    """One block, over the session or not at all, whether or not the node is still thought to be there."""
    core = pool._client.pool._core
    chain = pool.keys(tokens_of(1, seed))
    batch = batch_of(core, chain, range(1), [16], Wish(), copying(core.framer, rows_of(1, seed)), lacking_only=False)
    return put_here(local(pool), batch, Limits(time.monotonic_ns() + 5 * SECOND))


def answerless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts reach the node, their answers nobody."""
    real = Session._receive

    def receive(self: Session, deadline_ns: int) -> bytes:
        real(self, deadline_ns)
        raise DeadlineError("no answer in time")

    monkeypatch.setattr(Session, "_receive", receive)


def test_slab_whose_put_was_not_answered_is_not_written_to_again(pool: Client, offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The node may have published its front."""
    assert nearby_put(pool, 1)
    with monkeypatch.context() as patch:
        answerless(patch)
        assert not nearby_put(pool, 2)
    assert not nearby_put(pool, 3)
    assert len(offsets) == 2
    assert holds(pool, tokens_of(1, 2), rows_of(1, 2))


def test_interrupted_put_gives_its_slab_back(pool: Client, offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes with the answer leaves no doubtful room behind, and the session goes on."""
    assert nearby_put(pool, 1)

    def put(self: Session, *args: Any, real: Any = Session.put, **options: Any) -> Any:
        real(self, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Session, "put", put)
        with pytest.raises(KeyboardInterrupt):
            nearby_put(pool, 2)
    assert nearby_put(pool, 3)
    assert len(set(offsets)) == 3
    assert holds(pool, tokens_of(1, 2), rows_of(1, 2))


def test_idle_slab_of_a_session_that_is_over_is_not_written_to(pool: Client, offsets: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The node gives its bytes to others."""
    assert nearby_put(pool, 1)
    monkeypatch.setattr(Session, "alive", False)
    session = local(pool).session
    assert session is not None
    session._broken = "over"
    assert not nearby_put(pool, 2)
    assert len(offsets) == 1


def test_slab_whose_lease_is_over_is_dropped(pool: Client, offsets: list[int], sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The next put takes another one."""
    assert nearby_put(pool, 1)
    slabs, session = local(pool).slabs, local(pool).session
    assert slabs is not None
    assert session is not None
    ((slab, _),) = slabs._idle
    session.release(slab.lease_id)
    assert not nearby_put(pool, 2)
    sent.clear()
    assert nearby_put(pool, 3)
    assert sent == ["slab", "put"]
