"""A sequence by itself: blocks in and out, and limits that say what was wrong."""

import numpy as np
import pytest
import torch

from kvpool.block import Geometry
from kvpool.engine.cache import SequenceCache
from kvpool.errors import ConfigError

GEOMETRY = Geometry.uniform(layers=3, kv_heads=2, head_dim=4, block_tokens=8, dtype="float32")


def filled(tokens: int, limit: int = 64) -> SequenceCache:
    """A cache of random KV."""
    cache = SequenceCache(GEOMETRY, capacity=tokens, limit=limit)
    for array in (cache.store.keys, cache.store.values):
        array.copy_(torch.randn_like(array))
    cache.advance(tokens)
    return cache


def test_block_payload_is_layer_major_and_comes_back_bit_equal() -> None:
    """What the pool stores has the layout of a `Geometry`, and a partial block is packed."""
    cache, other = filled(21), SequenceCache(GEOMETRY, capacity=21, limit=64)
    for index, count in enumerate((8, 8, 5)):
        payload = np.empty(GEOMETRY.payload_bytes(count), np.uint8)
        cache.copy_block(index, count, payload)
        expected = cache.data[:, :, :, 8 * index : 8 * index + count]
        assert torch.equal(torch.from_numpy(payload).view(torch.float32).view(3, 2, 2, count, 4), expected)
        other.write_block(index, count, payload)
    other.advance(21)
    assert torch.equal(other.data, cache.data)


def test_cache_refuses_what_it_has_no_room_or_no_tokens_for() -> None:
    """Each limit is told with its numbers."""
    cache = filled(21, limit=24)
    payload = np.empty(GEOMETRY.payload_bytes(8), np.uint8)
    for complaint, call in (
        ("not complete: 21", lambda: cache.copy_block(2, 8, payload)),
        ("no room", lambda: cache.write_block(3, 8, payload)),
        ("can't advance", lambda: cache.advance(4)),
        ("can't truncate", lambda: cache.truncate(22)),
        ("limited to 24", lambda: cache.segment([1] * 4, scores=True)),
        ("contiguous", lambda: cache.copy_block(0, 8, np.empty(2 * payload.size, np.uint8)[::2])),
        ("between 1 and its limit", lambda: SequenceCache(GEOMETRY, capacity=5, limit=4)),
    ):
        with pytest.raises(ConfigError, match=complaint):
            call()


def test_poison_shows_behind_the_valid_tokens_only() -> None:
    """A check for unwritten KV must not change what is there."""
    cache = filled(10)
    before = cache.data
    cache.poison()
    assert torch.equal(cache.data, before)
    cache.advance(1)
    assert torch.isnan(cache.data[:, :, :, 10]).all()
