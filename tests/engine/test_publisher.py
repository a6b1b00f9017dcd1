"""Pushing finished blocks: each once, in order, together when they pile up, and truthfully reported."""

import asyncio
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

import pytest
import torch

from kvpool.block import BlockKey, Geometry
from kvpool.engine.cache import SequenceCache
from kvpool.engine.chain import Chain
from kvpool.engine.publisher import TAIL_TTL_NS, Publisher
from kvpool.engine.store import Fill, MemoryStore
from kvpool.errors import ClosedError
from kvpool.units import SECOND

GEOMETRY = Geometry.uniform(layers=1, kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
ROOT = bytes(range(32))


class SlowStore(MemoryStore):
    """Waits for `go` in each store call."""

    def __init__(self) -> None:
        super().__init__(GEOMETRY.bytes_per_token)
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def store(self, chain: Sequence[BlockKey], first: int, counts: Sequence[int], fill: Fill, **times: Any) -> int:
        await self.go.wait()
        if self.error:
            raise self.error
        return await super().store(chain, first, counts, fill, **times)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


def _publisher(store: MemoryStore, tokens: int, first: int = 0, **more: Any) -> tuple[Publisher, Chain, SequenceCache]:
    """A publisher over a sequence whose KV is its token ids 0, 1, 2..."""
    chain = Chain(ROOT, 4, range(tokens))
    cache = SequenceCache(GEOMETRY, capacity=tokens, limit=1000)
    cache.view.update(*torch.arange(tokens, dtype=torch.float32)[None, None, None, :, None].expand(2, 1, 1, -1, 2), 0)
    cache.advance(tokens)
    return Publisher(store, chain, cache, first, **more), chain, cache


def _soon() -> int:
    return monotonic_ns() + 10 * SECOND


async def test_offer_pushes_each_full_block_once_with_its_bytes(store: SlowStore) -> None:
    """What piles up during a push goes together in the next; nothing goes twice."""
    publisher, chain, cache = _publisher(store, 18)
    for tokens in (3, 5, 9, 17):
        publisher.offer(tokens)
        await asyncio.sleep(0)
    store.go.set()
    assert await publisher.drain(_soon())
    assert store.stores == [(0, 1, 1), (1, 3, 3)]
    assert list(store.blocks) == chain.keys
    assert all((store.blocks[key] == cache.read_block(i, 4)).all() for i, key in enumerate(chain.keys))
    assert (publisher.written, publisher.held, publisher.failed) == (4, 16, False)


async def test_offer_tail_pushes_the_partial_block_last_and_for_a_minute(store: SlowStore) -> None:
    """The hand-off needs the whole prompt."""
    publisher, chain, _ = _publisher(store, 18)
    publisher.offer(8)
    publisher.offer_tail()
    store.go.set()
    assert await publisher.drain(_soon())
    assert list(store.blocks) == chain.with_tail()
    assert list(store.ttls.values()) == [0, 0, 0, 0, TAIL_TTL_NS]
    assert (publisher.written, publisher.held) == (5, 18)


async def test_offer_tail_of_whole_blocks_pushes_no_more(store: SlowStore) -> None:
    """A prompt that ends with a block has no tail."""
    publisher, _, _ = _publisher(store, 8)
    store.go.set()
    publisher.offer_tail()
    assert await publisher.drain(_soon())
    assert (len(store.blocks), publisher.held) == (2, 8)


async def test_publisher_skips_what_the_pool_has_and_does_not_count_it_as_written(store: SlowStore) -> None:
    """Blocks that came from the pool aren't pushed; blocks others pushed meanwhile count as held, not as written."""
    store.go.set()
    early, _, _ = _publisher(store, 16)
    early.offer(12)
    await early.drain(_soon())
    store.stores.clear()
    publisher, _, _ = _publisher(store, 16, first=2)
    assert publisher.held == 8
    publisher.offer(16)
    await publisher.drain(_soon())
    assert store.stores == [(2, 2, 2)]
    assert (publisher.written, publisher.held) == (1, 16)


async def test_publisher_whose_store_refuses_reports_only_what_is_held(store: SlowStore) -> None:
    """`held` is a promise to the decode worker's router: never more than the leading run."""
    store.go.set()
    publisher, _, _ = _publisher(store, 16)
    publisher.offer(8)
    await publisher.drain(_soon())
    store.fail_stores = True
    publisher.offer(12)
    await publisher.drain(_soon())
    store.fail_stores = False
    publisher.offer(16)
    assert await publisher.drain(_soon())
    assert (publisher.written, publisher.held, publisher.failed) == (3, 8, True)


async def test_drain_past_its_deadline_says_busy(store: SlowStore) -> None:
    """While a push may still copy, the memory can't be handed on."""
    publisher, _, _ = _publisher(store, 8)
    publisher.offer(8)
    assert not await publisher.drain(monotonic_ns())
    assert publisher.busy
    store.go.set()
    assert await publisher.drain(_soon())
    assert not publisher.busy


async def test_publisher_names_with_every_block_where_it_is_wanted_next(store: SlowStore) -> None:
    """Full blocks and the tail alike: the decode worker there needs the whole prompt."""
    store.go.set()
    publisher, chain, _ = _publisher(store, 18, also=("a", "b"))
    publisher.offer(8)
    publisher.offer_tail()
    assert await publisher.drain(_soon())
    assert store.pushed == [(key, ("a", "b")) for key in chain.with_tail()]
    store.pushed.clear()
    plain, chain, _ = _publisher(store, 8)
    plain.offer(8)
    assert await plain.drain(_soon())
    assert store.pushed == [(key, ()) for key in chain.keys]


async def test_publisher_survives_a_store_that_raises(store: SlowStore, caplog: pytest.LogCaptureFixture) -> None:
    """A request doesn't fail because its blocks can't be kept; the failure is logged."""
    store.error = ClosedError("closed under us")
    store.go.set()
    publisher, _, _ = _publisher(store, 8)
    publisher.offer(8)
    assert await publisher.drain(_soon())
    assert (publisher.failed, publisher.held) == (True, 0)
    assert "closed under us" in caplog.text
