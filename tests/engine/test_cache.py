"""The KV array of one sequence: what goes in comes out, whatever grows or shrinks meanwhile."""

import threading

import numpy as np
import pytest
import torch

from kvpool.block import Geometry, LayerSpec
from kvpool.engine.cache import SequenceCache
from kvpool.errors import ConfigError

LAYERS, HEADS, DIM, BLOCK = 3, 2, 4, 8


def _geometry(dtype: str = "float32") -> Geometry:
    return Geometry.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_tokens=BLOCK, dtype=dtype)


def _filled(tokens: int, *, capacity: int = 64, dtype: str = "float32") -> SequenceCache:
    """A cache with random KV, written layer by layer as a model does."""
    cache = SequenceCache(_geometry(dtype), capacity=capacity, limit=256)
    generator = torch.Generator().manual_seed(tokens)
    for layer in range(LAYERS):
        keys = torch.randn(2, 1, HEADS, tokens, DIM, generator=generator).to(cache.data.dtype)
        cache.view.update(keys[0], keys[1], layer)
    cache.advance(tokens)
    return cache


def test_update_returns_all_keys_and_values_so_far() -> None:
    """A layer attends to everything up to and including the pass being computed."""
    cache = _filled(5)
    keys, values = torch.randn(2, 1, HEADS, 3, DIM)
    all_keys, all_values = cache.view.update(keys, values, 1)
    assert all_keys.shape == all_values.shape == (1, HEADS, 8, DIM)
    assert torch.equal(all_keys[:, :, 5:], keys)
    assert torch.equal(all_values[:, :, 5:], values)
    assert torch.equal(all_keys[0, :, :5], cache.data[1, 0])


def test_update_alone_does_not_advance() -> None:
    """A pass that fails halfway leaves the sequence as it was."""
    cache = _filled(5)
    cache.view.update(*torch.randn(2, 1, HEADS, 3, DIM), 0)
    assert cache.length == cache.view.get_seq_length() == 5
    assert cache.view.get_mask_sizes(3, 0) == (8, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("index", "n_tokens"), [(0, 8), (2, 8), (3, 5)])
def test_read_block_has_the_payload_layout(dtype: str, index: int, n_tokens: int) -> None:
    """A payload is [layers, K then V, kv_heads, tokens, head_dim], contiguous, in the model's own dtype."""
    cache = _filled(29, dtype=dtype)
    payload = cache.read_block(index, n_tokens)
    expected = cache.data[:, :, :, 8 * index : 8 * index + n_tokens].contiguous()
    assert payload.tobytes() == expected.view(torch.uint8).numpy().tobytes()
    assert payload.nbytes == cache.geometry.payload_bytes(n_tokens)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_write_block_restores_what_read_block_took(dtype: str) -> None:
    """A sequence moved block by block is the same sequence, bit for bit."""
    cache, other = _filled(29, dtype=dtype), SequenceCache(_geometry(dtype), capacity=40, limit=40)
    for index, n_tokens in enumerate((8, 8, 8, 5)):
        other.write_block(index, n_tokens, cache.read_block(index, n_tokens))
    other.advance(29)
    assert torch.equal(other.data, cache.data)


def test_reserve_doubles_up_to_the_limit_and_keeps_the_data() -> None:
    """Growing token by token copies each token a bounded number of times, and never past the limit."""
    cache = _filled(60)
    before = cache.data.clone()
    cache.reserve(65)
    assert cache.capacity == 128
    cache.reserve(129)
    assert cache.capacity == 256
    assert cache.nbytes == 256 * cache.geometry.bytes_per_token
    assert torch.equal(cache.data, before)
    with pytest.raises(ConfigError, match="limited to 256"):
        cache.reserve(257)


@pytest.mark.parametrize("capacity", [1, 3, 1000])
def test_cache_memory_is_aligned(capacity: int) -> None:
    """Kernels may sum in another order on memory that isn't aligned, and equal passes must give equal bits."""
    assert SequenceCache(_geometry(), capacity=capacity, limit=1000).data.data_ptr() % 64 == 0


def test_fit_gives_back_what_is_beyond_a_new_limit() -> None:
    """A cache that changes hands takes no more memory than its new request may."""
    cache = _filled(20, capacity=200)
    before = cache.data.clone()
    cache.fit(capacity=30, limit=40)
    assert (cache.capacity, cache.limit) == (30, 40)
    assert torch.equal(cache.data, before)
    with pytest.raises(ConfigError, match="can't fit"):
        cache.fit(capacity=19, limit=40)


def test_truncate_then_continue_overwrites() -> None:
    """A shared prefix is kept, what was behind it is gone."""
    cache = _filled(20)
    prefix = cache.data[:, :, :, :9].clone()
    cache.truncate(9)
    assert torch.equal(cache.data, prefix)
    all_keys, _ = cache.view.update(*torch.ones(2, 1, HEADS, 1, DIM), 0)
    assert all_keys.shape[2] == 10
    with pytest.raises(ConfigError, match="can't truncate"):
        cache.truncate(10)


def test_blocks_out_of_range_are_refused() -> None:
    """An incomplete block must not be published, one without room must not be written."""
    cache = _filled(20)
    with pytest.raises(ConfigError, match="not complete"):
        cache.read_block(2, 8)
    with pytest.raises(ConfigError, match="no room"):
        cache.write_block(8, 8, np.zeros(cache.geometry.payload_bytes(8), np.uint8))
    with pytest.raises(ConfigError, match="can't advance"):
        cache.advance(45)
    with pytest.raises(ConfigError, match="contiguous"):
        cache.copy_block(0, 8, np.zeros(2 * cache.geometry.payload_bytes(8), np.uint8)[::2])


def test_update_of_another_shape_is_refused() -> None:
    """A model whose layers cache something else is caught before anything is stored."""
    with pytest.raises(ConfigError, match="not its geometry"):
        _filled(3).view.update(*torch.zeros(2, 1, HEADS + 1, 1, DIM), 0)


def test_cache_of_mixed_layers_is_refused() -> None:
    """The engine's array needs layers that are alike."""
    geometry = Geometry((LayerSpec("full", 2, 4, 4), LayerSpec("full", 1, 4, 4)), 8, "float32")
    with pytest.raises(ConfigError, match="all alike"):
        SequenceCache(geometry, capacity=1, limit=1)


def test_finished_blocks_can_be_read_while_the_cache_grows() -> None:
    """The pusher copies finished blocks in another thread while the compute thread appends and grows."""
    cache = SequenceCache(_geometry(), capacity=8, limit=4096)
    step = torch.ones(1, HEADS, 1, DIM)
    wrong: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            for index in range(cache.length // BLOCK):
                payload = cache.read_block(index, BLOCK).view(np.float32).reshape(LAYERS, 2, HEADS, BLOCK, DIM)
                if not (payload == np.arange(index * BLOCK, index * BLOCK + BLOCK)[None, None, None, :, None]).all():
                    wrong.append(index)

    reader = threading.Thread(target=read)
    reader.start()
    for token in range(1500):
        cache.reserve(token + 1)
        for layer in range(LAYERS):
            cache.view.update(step * token, step * token, layer)
        cache.advance(1)
    done.set()
    reader.join()
    assert wrong == []
