"""Reading by key on the node's host: no lease, no message, and never a wrong byte."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvpool
from kvpool.block import BlockKey, Namespace
from kvpool.client import AsyncPoolClient
from kvpool.client import local as local_reach
from kvpool.client.here import Limits
from kvpool.client.local import LocalReach
from kvpool.errors import ConfigError
from kvpool.testing.node_process import NodeProcess
from kvpool.tier.board import Cell
from kvpool.units import SECOND
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.session_client import Session

Payload = npt.NDArray[np.uint8]
BLOCKS = 20
TOKENS = list(range(16 * BLOCKS))
COUNTS = [16] * BLOCKS


def soon(seconds: float = 30.0) -> int:
    return time.monotonic_ns() + int(seconds * SECOND)


def content(index: int, nbytes: int) -> Payload:
    return np.random.default_rng(index).integers(0, 256, nbytes, dtype=np.uint8)


def fill(index: int, payload: Payload) -> None:
    payload[:] = content(index, payload.nbytes)


def targets(pool: AsyncPoolClient, counts: list[int]) -> list[Payload]:
    return [np.zeros(pool.namespace.geometry.payload_bytes(n), np.uint8) for n in counts]


def right(rows: list[Payload]) -> list[bool]:
    return [bool(np.array_equal(row, content(index, row.nbytes))) for index, row in enumerate(rows)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the calls by gRPC that were made to find, lease or publish blocks."""
    made: list[str] = []
    for name in ("lookup", "acquire", "reserve", "commit"):
        real = getattr(PoolRpc, name)

        async def noted(self: PoolRpc, *args: Any, name: str = name, real: Any = real, **options: Any) -> Any:
            made.append(name)
            return await real(self, *args, **options)

        monkeypatch.setattr(PoolRpc, name, noted)
    return made


@pytest.fixture
async def pool(node: NodeProcess, namespace: Namespace) -> AsyncIterator[AsyncPoolClient]:
    async with await AsyncPoolClient.open(node.address, namespace, transport="shm") as made:
        yield made


async def stored(pool: AsyncPoolClient, transport: str = "") -> list[BlockKey]:
    """The chain of `TOKENS`, stored by `pool`, or by another client over `transport`."""
    chain = pool.keys(TOKENS)
    if not transport:
        assert await pool.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
        return chain
    (address,) = {ref.address for ref in pool._core.links.nodes()}
    async with await AsyncPoolClient.open(address, pool.namespace, transport=transport) as other:
        assert await other.store(chain, 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    return chain


def local(pool: AsyncPoolClient) -> LocalReach:
    (reach,) = pool._core.links.locals
    return reach


def places(pool: AsyncPoolClient, chain: list[BlockKey]) -> list[int]:
    """Where the blocks lie in the arena."""
    board = local(pool).board
    assert board is not None
    found = board.find(chain, time.monotonic_ns())
    assert found.leading() == len(chain)
    offsets: list[int] = found.offsets.tolist()
    return offsets


async def test_store_load_and_lookup_on_the_host_make_no_call(pool: AsyncPoolClient, calls: list[str]) -> None:
    """The board and the session do it all, whole blocks and a partial one."""
    chain, counts = pool.keys([*TOKENS, 1, 2, 3], tail=True), [*COUNTS, 3]
    assert await pool.store(chain, 0, counts, fill, deadline_ns=soon()) == BLOCKS + 1
    rows = targets(pool, counts)
    assert await pool.load_into(chain, 0, rows, deadline_ns=soon()) == BLOCKS + 1
    assert all(right(rows))
    seen: list[int] = []

    def sink(index: int, payload: Payload) -> None:
        assert np.array_equal(payload, content(index, payload.nbytes))
        with pytest.raises(ValueError, match="read-only"):
            payload[0] = 1
        seen.append(index)

    assert await pool.load(chain, 4, counts[4:], sink, deadline_ns=soon()) == BLOCKS + 1 - 4
    assert seen == list(range(4, BLOCKS + 1))
    assert await pool.lookup(chain) == BLOCKS + 1
    assert calls == []
    assert pool.direct() == {"hits": 2 * (BLOCKS + 1) - 4, "misses": 0, "retries": 0}
    assert list(pool.reaches().values()) == ["shm"]


async def test_what_is_not_on_the_board_is_asked_for_and_counted(pool: AsyncPoolClient, calls: list[str]) -> None:
    """A node may have it on a disk; behind the hole nothing is of use."""
    chain = await stored(pool)
    longer = [*chain, *pool.keys([*TOKENS, *range(32)])[BLOCKS:]]
    rows = targets(pool, [16] * (BLOCKS + 2))
    assert await pool.load_into(longer, 0, rows, deadline_ns=soon()) == BLOCKS
    assert all(right(rows[:BLOCKS]))
    assert calls == ["acquire"]
    assert pool.direct() == {"hits": BLOCKS, "misses": 2, "retries": 0}
    assert await pool.lookup(longer) == BLOCKS
    assert calls == ["acquire", "lookup"]


async def test_load_into_takes_the_gap_from_elsewhere(pool: AsyncPoolClient, calls: list[str]) -> None:
    """Blocks on both sides of one that the board lacks are not moved twice."""
    chain = await stored(pool)
    rows = targets(pool, COUNTS)
    (gap,) = places(pool, [chain[7]])
    local(pool).memory[gap] ^= 1  # the magic: no look at it is good
    assert await pool.load_into(chain, 0, rows, deadline_ns=soon()) == 7
    assert calls == ["acquire"]
    assert right(rows).count(True) == BLOCKS - 1
    assert pool.direct() == {"hits": BLOCKS - 1, "misses": 1, "retries": 0}


@pytest.mark.parametrize(("transport", "checksums"), [("grpc", "wire"), ("", "always")])
async def test_damage_is_seen_where_checksums_are_looked_at(
    node: NodeProcess, namespace: Namespace, transport: str, checksums: Any
) -> None:
    """Bytes that came over a wire and that nobody has checked since, and all bytes for who asks for that."""
    async with await AsyncPoolClient.open(node.address, namespace, transport="shm", checksums=checksums) as pool:
        assert await pool.connect() == []
        chain = await stored(pool, transport)
        at = places(pool, chain)[3] + pool._core.framer.header_bytes + 11
        local(pool).memory[at] ^= 4
        rows = targets(pool, COUNTS)
        assert await pool.load_into(chain, 0, rows, deadline_ns=soon()) == 3
        assert await pool.load(chain, 0, COUNTS, lambda index, payload: None, deadline_ns=soon()) == 3
        assert await pool.lookup(chain) == 3


async def test_header_of_another_block_is_no_answer(pool: AsyncPoolClient) -> None:
    """Whatever a board says, the frame itself must name the block."""
    chain = await stored(pool)
    two, three = places(pool, chain)[2:4]
    memory, nbytes = local(pool).memory, pool._core.framer.header_bytes
    memory[two : two + nbytes] = memory[three : three + nbytes].copy()
    assert await pool.load_into(chain, 0, targets(pool, COUNTS), deadline_ns=soon()) == 2


async def test_node_without_sessions_is_used_as_before(
    node: NodeProcess, namespace: Namespace, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mapping alone, with leases by gRPC."""
    monkeypatch.setattr(LocalReach, "join", lambda self, *args: False)
    async with await AsyncPoolClient.open(node.address, namespace, transport="shm") as pool:
        chain = await stored(pool)
        rows = targets(pool, COUNTS)
        assert await pool.load_into(chain, 0, rows, deadline_ns=soon()) == BLOCKS
        assert all(right(rows))
    assert calls == ["reserve", "commit", "acquire"]


async def test_targets_that_fit_no_block_are_refused(pool: AsyncPoolClient) -> None:
    """Before any byte moves."""
    chain = pool.keys(TOKENS)
    frozen = np.zeros(512 * 16, np.uint8)
    frozen.flags.writeable = False
    wrong: list[Any] = [np.zeros(100, np.uint8), np.zeros(512 * 17, np.uint8), np.zeros(512, np.int8), np.zeros((2, 512), np.uint8), frozen]
    for bad in wrong:
        with pytest.raises(ConfigError):
            await pool.load_into(chain, 0, [bad], deadline_ns=soon())
    with pytest.raises(ConfigError, match="wire or always"):
        await AsyncPoolClient.open("127.0.0.1:1", pool.namespace, checksums="never")  # type: ignore[arg-type]


def test_synchronous_calls_on_the_host_leave_the_event_loop_alone(
    node: NodeProcess, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once connected: put, get and lookup by tokens and by keys, of one block and of many."""
    with kvpool.connect(node.address, namespace=namespace) as pool:
        rows = np.stack([content(i, 512 * 16) for i in range(BLOCKS)])
        assert pool.put(TOKENS[:16], rows[:1]) == 16  # connects
        monkeypatch.setattr(pool, "_run", _never)
        assert pool.put(TOKENS, rows) == 16 * BLOCKS
        assert pool.lookup(TOKENS) == 16 * BLOCKS
        out = np.zeros_like(rows)
        assert pool.get(TOKENS, out).tokens == 16 * BLOCKS
        assert np.array_equal(out, rows)
        got = pool.get(TOKENS)
        assert np.array_equal(got.blocks.view(np.uint8).reshape(BLOCKS, -1), rows)
        one = np.zeros_like(rows[:1])
        assert pool.get_blocks(pool.keys(TOKENS)[:1], one).tokens == 16
        assert np.array_equal(one, rows[:1])
        chain = pool.keys([9, *TOKENS[1:]])
        assert pool.put_blocks(chain, rows) == pool.lookup_blocks(chain) == BLOCKS
        monkeypatch.undo()


def _never(work: Any) -> Any:
    work.close()
    raise AssertionError("the event loop was asked")


async def test_session_that_ends_costs_nothing_but_a_connection(
    start_node: Callable[..., NodeProcess], namespace: Namespace, calls: list[str]
) -> None:
    """The node lives on: the same call connects anew and delivers."""
    node = start_node()
    async with await AsyncPoolClient.open(node.address, namespace, transport="shm") as pool:
        chain = await stored(pool)
        first = local(pool)
        assert first.session is not None
        first.session.close()
        rows = targets(pool, COUNTS)
        assert await pool.load_into(chain, 0, rows, deadline_ns=soon()) == BLOCKS
        assert all(right(rows))
        assert local(pool) is not first
        assert await pool.store(pool.keys([5, *TOKENS]), 0, COUNTS, fill, deadline_ns=soon()) == BLOCKS
    assert calls == ["acquire"]


async def test_only_what_was_copied_counts_as_used(pool: AsyncPoolClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as many from the front, where blocks in front were no good."""
    chain = await stored(pool)
    (gap,) = places(pool, [chain[0]])
    local(pool).memory[gap] ^= 1
    used: list[Any] = []
    monkeypatch.setattr(Cell, "touch", lambda self, entries: used.extend((entries & np.uint64(0xFFFF_FFFF)).tolist()))
    got = pool._core.here.read(chain[:3], COUNTS[:3], targets(pool, COUNTS[:3]), Limits(soon()))
    assert list(got) == [0, 1, 1]
    board = local(pool).board
    assert board is not None
    assert used == board.find(chain[1:3], time.monotonic_ns()).slots.tolist()


async def test_trouble_of_the_system_with_a_session_leaves_nothing_open(
    node: NodeProcess, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory to map the board: the node is used without a session, and no descriptor stays."""
    closed: list[str] = []

    def noted(owner: Any) -> None:
        real = owner.close

        def close(self: Any) -> None:
            closed.append(owner.__name__)
            real(self)

        monkeypatch.setattr(owner, "close", close)

    noted(Session)
    noted(Cell)
    with monkeypatch.context() as patch:
        patch.setattr(local_reach, "BoardReader", _no_memory)
        async with await AsyncPoolClient.open(node.address, namespace, transport="shm") as pool:
            await stored(pool)
            assert pool._core.links.locals == ()
            assert closed == ["Session", "Cell"]


def _no_memory(*args: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")
