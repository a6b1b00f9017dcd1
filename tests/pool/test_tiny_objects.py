"""Very many very small blocks: what the pool keeps about them is bounded and stated."""

import gc
import tracemalloc

import pytest

from kvpool.block import BlockKey
from kvpool.policy.eviction import PrefixLru, make_policy
from kvpool.pool import NO_SPACE, PoolLimits, PoolState, Reserve

COUNT = 25_000
BATCH = 1000
METADATA_BYTES = 1024
"""Python memory that one resident block may cost, its key included; docs/pool.md states the measured figure."""


def fill(pool: PoolState, first: int, count: int) -> int:
    """Put `count` single blocks of 64 to 256 bytes; how many were refused."""
    refused = 0
    for start in range(first, first + count, BATCH):
        keys = [BlockKey(i.to_bytes(32, "little")) for i in range(start, start + BATCH)]
        got = pool.reserve([Reserve(key, None, 0, 64 + key[0] % 193) for key in keys], owner="w", lease_ns=10, now_ns=start)
        pool.commit(got.lease_id, keys, start)
        refused += sum(grant is NO_SPACE for grant in got.grants)
    return refused


@pytest.mark.parametrize("policy", ["prefix-lru", "value"])
def test_metadata_of_tiny_blocks_is_bounded_per_block(policy: str) -> None:
    """Peers kept unbounded metadata; here a block of 64 bytes costs a stated number of bytes of bookkeeping."""
    gc.collect()
    tracemalloc.start()
    try:
        pool = PoolState(COUNT * 256, make_policy(policy), PoolLimits(max_story_keys=1))
        before = tracemalloc.get_traced_memory()[0]
        assert fill(pool, 0, COUNT) == 0
        gc.collect()
        per_block = (tracemalloc.get_traced_memory()[0] - before) / COUNT
    finally:
        tracemalloc.stop()
    assert pool.books().blocks == COUNT
    assert per_block < METADATA_BYTES


def test_limit_of_blocks_evicts_like_a_limit_of_bytes() -> None:
    """However small the blocks, there are never more than the limit says."""
    pool = PoolState(COUNT * 256, PrefixLru(), PoolLimits(max_blocks=5000))
    assert fill(pool, 0, 20_000) == 0
    books = pool.books()
    assert books.blocks == 5000
    assert pool.counters()["evicted"] == 15_000
    assert books.free + books.used + books.pinned == books.capacity
    pool.check()
