"""KV that stays in the worker: the right one is found, and the bytes are bounded."""

import random

import pytest
import torch

from kvpool.block import BlockKey, Geometry, chain_keys
from kvpool.engine.cache import SequenceCache
from kvpool.engine.resident import ResidentStore

GEOMETRY = Geometry.uniform(layers=1, kv_heads=1, head_dim=2, block_tokens=4, dtype="float32")
TOKEN_BYTES = GEOMETRY.bytes_per_token
ROOT = bytes(32)


def _keys(tokens: list[int]) -> list[BlockKey]:
    return chain_keys(ROOT, tokens, 4)


def _cache(tokens: list[int], capacity: int | None = None) -> SequenceCache:
    """A cache whose KV is its token ids."""
    cache = SequenceCache(GEOMETRY, capacity=capacity or len(tokens), limit=1000)
    cache.view.update(*torch.tensor(tokens, dtype=torch.float32)[None, None, None, :, None].expand(2, 1, 1, -1, 2), 0)
    cache.advance(len(tokens))
    return cache


def _put(store: ResidentStore, tokens: list[int], capacity: int | None = None) -> bool:
    return store.put(_keys(tokens), tokens, _cache(tokens, capacity))


def _common(one: list[int], two: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _take(store: ResidentStore, tokens: list[int]) -> list[int] | None:
    cache = store.take(_keys(tokens), tokens)
    return None if cache is None else [int(t) for t in cache.data[0, 0, 0, :, 0]]


def test_take_returns_the_longest_match_truncated_to_the_token() -> None:
    """Behind the last shared block single tokens still count."""
    store = ResidentStore(1 << 20)
    _put(store, [1, 2, 3, 4, 9, 9, 9, 9])
    _put(store, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert _take(store, [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert _take(store, [1, 2, 3, 4, 9, 0]) == [1, 2, 3, 4, 9]
    assert _take(store, [1, 2, 3, 4]) is None
    assert (len(store), store.used_bytes, store.tokens) == (0, 0, 0)


def test_take_is_exclusive() -> None:
    """Two requests never write to one cache."""
    store = ResidentStore(1 << 20)
    _put(store, [1, 2, 3, 4])
    assert _take(store, [1, 2, 3, 4, 5]) == [1, 2, 3, 4]
    assert _take(store, [1, 2, 3, 4, 5]) is None


def test_take_of_less_than_a_block_is_a_miss() -> None:
    """A few common tokens aren't worth another request's cache."""
    store = ResidentStore(1 << 20)
    _put(store, [1, 2, 3, 4, 5])
    assert _take(store, [1, 2, 3, 5]) is None
    assert _take(store, [1, 2, 3]) is None
    assert len(store) == 1


def test_put_drops_the_oldest_when_full_and_counts_capacity_not_length() -> None:
    """The bound is on memory taken, valid or not."""
    store = ResidentStore(20 * TOKEN_BYTES)
    assert _put(store, [1] * 4, capacity=8)
    assert _put(store, [2] * 4, capacity=8)
    assert _put(store, [3] * 4, capacity=8)
    assert store.used_bytes == 16 * TOKEN_BYTES
    assert _take(store, [1] * 4) is None
    assert _take(store, [2] * 4) == [2] * 4


def test_put_refuses_what_cannot_be_of_use() -> None:
    """Too large, or without a full block; and a store of 0 bytes keeps nothing."""
    store = ResidentStore(10 * TOKEN_BYTES)
    assert not _put(store, [1] * 11)
    assert not _put(store, [1, 2, 3])
    assert not _put(ResidentStore(0), [1] * 4)
    assert store.used_bytes == 0


def test_put_replaces_its_own_prefixes() -> None:
    """The next turn of a conversation makes the last one's cache useless."""
    store = ResidentStore(1 << 20)
    _put(store, [1, 2, 3, 4, 5])
    _put(store, [1, 2, 3, 4, 9, 9, 9, 9])
    _put(store, [1, 2, 3, 4, 5, 6, 7, 8])
    assert len(store) == 2
    _put(store, [1, 2, 3, 4, 5, 6, 7, 8])
    assert len(store) == 2


def test_put_keys_beyond_the_valid_tokens_are_ignored() -> None:
    """A block whose last token was chosen but not computed yet isn't there."""
    store = ResidentStore(1 << 20)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    store.put(_keys(tokens), tokens, _cache(tokens[:7]))
    assert _take(store, tokens) == tokens[:7]


@pytest.mark.parametrize("seed", range(5))
def test_store_under_random_use_keeps_its_books(seed: int) -> None:
    """Bytes never exceed the bound, every hit is the best there was, and clearing brings everything back to zero."""
    rng = random.Random(seed)
    store = ResidentStore(60 * TOKEN_BYTES)
    for _ in range(400):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 20))]
        if rng.random() < 0.5:
            _put(store, tokens, capacity=len(tokens) + rng.randrange(5))
        else:
            best = max((_common(list(e.tokens), tokens) for e in store._entries.values()), default=0)
            assert _take(store, tokens) == (tokens[:best] if best >= 4 else None)
        held = sorted(list(e.tokens) for e in store._entries.values())
        assert store.used_bytes == sum(e.cache.nbytes for e in store._entries.values()) <= 60 * TOKEN_BYTES
        assert store.tokens == sum(map(len, held))
        assert set(store._holders) == {key for e in store._entries.values() for key in e.keys}
    store.clear()
    assert (store.used_bytes, store.tokens, len(store), store._holders) == (0, 0, 0, {})
