"""The node's edge: what the wire may and may not do."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.block import BlockKey, Framer, Geometry, LayerSpec, Namespace
from kvpool.clock import ManualClock
from kvpool.errors import ConfigError
from kvpool.node.handler import NodeHandler
from kvpool.policy.eviction import PrefixLru
from kvpool.pool import PoolState
from kvpool.request.pool import Outcome, Reservation
from kvpool.tier import Arena
from kvpool.units import KIB, SECOND

GEOMETRY = Geometry((LayerSpec("full", 1, 8, 8),), 16, "float32")
FRAMER = Framer(Namespace(model="m", revision="1", weights_digest=bytes(32), geometry=GEOMETRY, rope="none"))
LENGTH = FRAMER.frame_bytes(16)
KEY = BlockKey(b"k" * 32)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(SECOND)


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path, "0" * 32, 1, 64 * KIB) as made:
        yield made


@pytest.fixture
def handler(arena: Arena, clock: ManualClock) -> NodeHandler:
    return NodeHandler(PoolState(arena.capacity, PrefixLru()), arena, clock, node_id="0" * 32, incarnation=1)


async def put(handler: NodeHandler, key: bytes = KEY) -> int:
    """Store a good block of `key`; its offset."""
    lease_id, [(outcome, offset)] = await handler.reserve("w", 1000, [Reservation(key, b"", 0, LENGTH)])
    assert outcome is Outcome.GRANTED
    frame = handler.window(lease_id, offset, LENGTH, write=True)
    frame[:] = 7
    FRAMER.stamp(frame, BlockKey(key), FRAMER.root, 16)
    assert handler.commit(lease_id, [key]) == [True]
    return offset


async def test_reserve_write_commit_acquire_read_release(handler: NodeHandler) -> None:
    """The whole life of a block through the edge."""
    offset = await put(handler)
    lease_id, places = await handler.acquire("r", 1000, [KEY, b"x" * 32])
    assert places == [(offset, LENGTH), None]
    payload = FRAMER.open(handler.window(lease_id, offset, LENGTH, write=False), KEY).payload
    assert np.all(payload == 7)
    assert handler.describe().read_leases == 1
    handler.release(lease_id, ())
    assert handler.describe().read_leases == 0


async def test_window_outside_the_lease_is_refused(handler: NodeHandler, clock: ManualClock) -> None:
    """A client reads and writes what it leases and nothing else, and nothing after the lease has ended."""
    await put(handler)
    lease_id, [place] = await handler.acquire("r", 1000, [KEY])
    assert place is not None
    for offset, length in ((place[0], LENGTH + 64), (place[0] + 4096, 8), (60 * KIB, 16 * KIB)):
        with pytest.raises(ConfigError, match="not covered by lease"):
            handler.window(lease_id, offset, length, write=False)
    clock.advance(2 * SECOND)
    handler.tick()
    with pytest.raises(ConfigError, match="may have ended"):
        handler.window(lease_id, place[0], LENGTH, write=False)


async def test_reader_of_a_block_may_not_write_it(handler: NodeHandler) -> None:
    """Blocks are immutable: a read lease gives no right to write."""
    await put(handler)
    lease_id, [place] = await handler.acquire("r", 1000, [KEY])
    assert place is not None
    with pytest.raises(ConfigError, match="write"):
        handler.window(lease_id, place[0], LENGTH, write=True)


async def test_suspect_that_is_damaged_is_dropped(handler: NodeHandler, arena: Arena) -> None:
    """The node looks for itself and drops what is really damaged."""
    offset = await put(handler)
    arena.view(offset, LENGTH)[LENGTH - 1] ^= 1
    lease_id, _ = await handler.acquire("r", 1000, [KEY])
    handler.release(lease_id, [KEY])
    assert handler.lookup([KEY]) == b"\0"
    assert handler.describe().counters["corrupt"] == 1


async def test_suspect_that_is_sound_stays(handler: NodeHandler) -> None:
    """A reader whose lease had run out may be wrong: its word alone evicts nothing."""
    await put(handler)
    lease_id, _ = await handler.acquire("r", 1000, [KEY])
    handler.release(lease_id, [KEY, b"u" * 32])
    assert handler.lookup([KEY]) == b"\1"
    assert handler.describe().counters["corrupt"] == 0


async def test_keys_of_the_wrong_length_are_refused(handler: NodeHandler) -> None:
    """Malformed keys stop at the edge."""
    with pytest.raises(ConfigError, match="32 bytes"):
        handler.lookup([b"short"])
    with pytest.raises(ConfigError, match="32 bytes"):
        await handler.reserve("w", 1000, [Reservation(b"short", b"", 0, 64)])


def test_node_without_grpc_data_says_so(arena: Arena, clock: ManualClock) -> None:
    """A node told not to move bytes over gRPC refuses instead of quietly doing it."""
    handler = NodeHandler(PoolState(arena.capacity, PrefixLru()), arena, clock, node_id="0" * 32, incarnation=1, grpc_data=False)
    with pytest.raises(ConfigError, match="--offer grpc"):
        handler.window(1, 0, 8, write=False)
