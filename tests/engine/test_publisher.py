"""Pushing finished blocks: each once, in order, together when they pile up, and truthfully reported."""

import asyncio
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest
import torch

from kvpool.block import BlockKey, Geometry
from kvpool.engine.chain import Chain
from kvpool.engine.paged.blocks import BlockManager
from kvpool.engine.paged.store import KvStore
from kvpool.engine.publisher import TAIL_TTL_NS, Memory, Publisher
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


class Rig:
    """A publisher over a sequence whose KV is its token ids 0, 1, 2..."""

    def __init__(self, store: MemoryStore, tokens: int, first: int = 0, **more: Any) -> None:
        self.chain = Chain(ROOT, 4, range(tokens))
        self.manager = BlockManager(capacity=8, block_tokens=4, keep=0)
        self.kv = KvStore(GEOMETRY, 8)
        self.table = self.manager.open()
        assert self.manager.grow(self.table, tokens) == []
        for array in (self.kv.keys, self.kv.values):
            array[0, 0, :tokens] = torch.arange(tokens, dtype=torch.float32)[:, None]
        self.freed = 0
        self.publisher = Publisher(store, self.chain, Memory(self.kv, self.manager, self._count), first, **more)

    def offer(self, tokens: int) -> None:
        self.manager.advance(self.table, tokens)
        self.publisher.offer(self.table, self.table.tokens)

    def offer_tail(self) -> None:
        self.manager.advance(self.table, len(self.chain))
        self.publisher.offer_tail(self.table)

    def payload(self, index: int, tokens: int) -> Any:
        payload = np.empty(GEOMETRY.payload_bytes(tokens), np.uint8)
        self.kv.copy_block(self.table.blocks[index], tokens, payload)
        return payload

    def _count(self) -> None:
        self.freed += 1


def _soon() -> int:
    return monotonic_ns() + 10 * SECOND


async def test_offer_pushes_each_full_block_once_with_its_bytes(store: SlowStore) -> None:
    """What piles up during a push goes together in the next; nothing goes twice."""
    rig = Rig(store, 18)
    for tokens in (3, 5, 9, 17):
        rig.offer(tokens)
        await asyncio.sleep(0)
    store.go.set()
    assert await rig.publisher.drain(_soon())
    assert store.stores == [(0, 1, 1), (1, 3, 3)]
    assert list(store.blocks) == rig.chain.keys
    assert all((store.blocks[key] == rig.payload(i, 4)).all() for i, key in enumerate(rig.chain.keys))
    assert (rig.publisher.written, rig.publisher.held, rig.publisher.failed) == (4, 16, False)


async def test_offer_tail_pushes_the_partial_block_last_and_for_a_minute(store: SlowStore) -> None:
    """The hand-off needs the whole prompt."""
    rig = Rig(store, 18)
    rig.offer(8)
    rig.offer_tail()
    store.go.set()
    assert await rig.publisher.drain(_soon())
    assert list(store.blocks) == rig.chain.with_tail()
    assert list(store.ttls.values()) == [0, 0, 0, 0, TAIL_TTL_NS]
    assert (rig.publisher.written, rig.publisher.held) == (5, 18)


async def test_offer_tail_of_whole_blocks_pushes_no_more(store: SlowStore) -> None:
    """A prompt that ends with a block has no tail."""
    rig = Rig(store, 8)
    store.go.set()
    rig.offer_tail()
    assert await rig.publisher.drain(_soon())
    assert (len(store.blocks), rig.publisher.held) == (2, 8)


async def test_publisher_skips_what_the_pool_has_and_does_not_count_it_as_written(store: SlowStore) -> None:
    """Blocks that came from the pool aren't pushed; blocks others pushed meanwhile count as held, not as written."""
    store.go.set()
    early = Rig(store, 16)
    early.offer(12)
    await early.publisher.drain(_soon())
    store.stores.clear()
    rig = Rig(store, 16, first=2)
    assert rig.publisher.held == 8
    rig.offer(16)
    await rig.publisher.drain(_soon())
    assert store.stores == [(2, 2, 2)]
    assert (rig.publisher.written, rig.publisher.held) == (1, 16)


async def test_publisher_whose_store_refuses_reports_only_what_is_held(store: SlowStore) -> None:
    """`held` is a promise to the decode worker's router: never more than the leading run."""
    store.go.set()
    rig = Rig(store, 16)
    rig.offer(8)
    await rig.publisher.drain(_soon())
    store.fail_stores = True
    rig.offer(12)
    await rig.publisher.drain(_soon())
    store.fail_stores = False
    rig.offer(16)
    assert await rig.publisher.drain(_soon())
    assert (rig.publisher.written, rig.publisher.held, rig.publisher.failed) == (3, 8, True)


async def test_drain_past_its_deadline_says_busy(store: SlowStore) -> None:
    """While a push may still copy, the memory can't be handed on."""
    rig = Rig(store, 8)
    rig.offer(8)
    assert not await rig.publisher.drain(monotonic_ns())
    assert rig.publisher.busy
    store.go.set()
    assert await rig.publisher.drain(_soon())
    assert not rig.publisher.busy


async def test_publisher_names_with_every_block_where_it_is_wanted_next(store: SlowStore) -> None:
    """Full blocks and the tail alike: the decode worker there needs the whole prompt."""
    store.go.set()
    rig = Rig(store, 18, also=("a", "b"))
    rig.offer(8)
    rig.offer_tail()
    assert await rig.publisher.drain(_soon())
    assert store.pushed == [(key, ("a", "b")) for key in rig.chain.with_tail()]
    store.pushed.clear()
    plain = Rig(store, 8)
    plain.offer(8)
    assert await plain.publisher.drain(_soon())
    assert store.pushed == [(key, ()) for key in plain.chain.keys]


async def test_publisher_survives_a_store_that_raises(store: SlowStore, caplog: pytest.LogCaptureFixture) -> None:
    """A request doesn't fail because its blocks can't be kept; the failure is logged."""
    store.error = ClosedError("closed under us")
    store.go.set()
    rig = Rig(store, 8)
    rig.offer(8)
    assert await rig.publisher.drain(_soon())
    assert (rig.publisher.failed, rig.publisher.held) == (True, 0)
    assert "closed under us" in caplog.text


async def test_blocks_are_held_until_they_are_pushed_though_the_sequence_has_ended(store: SlowStore) -> None:
    """Whoever gets the blocks next would write into what is being copied out; and room that comes free is told of."""
    rig = Rig(store, 18)
    rig.offer_tail()
    rig.manager.close(rig.table)
    assert (rig.manager.held, rig.freed) == (5, 0)
    store.go.set()
    assert await rig.publisher.drain(_soon())
    assert (rig.manager.held, rig.freed) == (0, 2)
    rig.manager.audit([])
