"""Ranks, layouts, trouble: what the random operations don't come to."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvpool.errors import ConfigError
from kvpool.testing.node_process import NodeProcess
from kvpool.testing.sglang_contract import create
from kvpool.testing.sglang_pools import PAGE, MhaPool, MlaPool, StatePool
from kvpool.testing.sglang_twin import PoolHitPolicy, PoolName, PoolTransfer

_numbers = itertools.count()
KEYS = [f"{i:064x}" for i in range(6)]
ALL = [True] * 6


@pytest.fixture
def model() -> str:
    """Other than that of every other test."""
    return f"model-{next(_numbers)}"


def backend_of(pool: str, model: str, host: Any, **given: Any) -> Any:
    made = create(pool, model_name=model, **{"extra": {"interface_v1": 1}, **given})
    made.register_mem_pool_host(host)
    return made


def fill(host: Any, seed: int) -> None:
    host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))


def indices(pages: Sequence[int], page_size: int = PAGE) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pages for i in range(page_size)])


def moved(writer: Any, source: Any, reader: Any, target: Any) -> list[bool]:
    """Which of six pages `reader` finds that `writer` wrote, each right in its place, in another order."""
    assert writer.batch_set_v1(KEYS, indices(range(6))) == ALL
    assert reader.batch_exists(KEYS) in (0, 6)
    came: list[bool] = reader.batch_get_v1(KEYS, indices(range(6, 0, -1)))
    for i, there in enumerate(came):
        assert not there or torch.equal(source.get_data_page(i * PAGE), target.get_data_page((6 - i) * PAGE))
    assert reader.batch_exists(KEYS) == sum(came)
    return came


def test_other_process_of_the_same_deployment_finds_pages(pool: str, model: str) -> None:
    """Restarted, or one of many: what counts is what the bytes are."""
    source, target = MhaPool("page_first", 8), MhaPool("page_first", 8)
    fill(source, 1)
    writer, reader = backend_of(pool, model, source), backend_of(pool, model, target)
    assert moved(writer, source, reader, target) == ALL
    writer.close()
    reader.close()


@pytest.mark.parametrize(
    ("host", "given"),
    [
        (MhaPool("page_first_direct", 8), {}),
        (MhaPool("page_first", 8), {"tp_size": 2, "tp_rank": 1}),
        (MhaPool("page_first", 8), {"extra": {"interface_v1": 1, "scope": "other weights"}}),
        (MhaPool("page_first", 8, heads=2), {}),
    ],
)
def test_other_bytes_are_not_found(pool: str, model: str, host: Any, given: dict[str, Any]) -> None:
    """A page in another layout, or of another rank, would be garbage that nobody notices."""
    source = MhaPool("page_first", 8)
    writer, reader = backend_of(pool, model, source), backend_of(pool, model, host, **given)
    assert moved(writer, source, reader, host) == [False] * 6
    writer.close()
    reader.close()


def test_mla_pages_are_written_by_one_rank_and_read_by_all(pool: str, model: str) -> None:
    """SGLang backs up only rank 0's: the latents are the same everywhere."""
    source, target = MlaPool("layer_first", 8), MlaPool("layer_first", 8)
    fill(source, 2)
    ranks = [backend_of(pool, model, host, is_mla_model=True, tp_size=2, tp_rank=i) for i, host in enumerate((source, target))]
    assert moved(ranks[0], source, ranks[1], target) == ALL
    for one in ranks:
        one.close()


def test_ranks_of_several_sizes_share_split_heads(pool: str, model: str) -> None:
    """Two ranks with four heads each write what four ranks with two heads each read."""
    halves = [MhaPool("page_head", 8, heads=4) for _ in range(2)]
    for rank, host in enumerate(halves):
        fill(host, rank)
        split = {"tp_size": 2, "tp_rank": rank, "tp_lcm_size": 4, "should_split_heads": True}
        writer = backend_of(pool, model, host, **split)
        assert writer.batch_set_v1(KEYS, indices(range(6))) == ALL
        assert writer.batch_exists(KEYS) == 6
        writer.close()
    for rank in range(4):
        quarter = MhaPool("page_head", 8, heads=2)
        reader = backend_of(pool, model, quarter, tp_size=4, tp_rank=rank, tp_lcm_size=4)
        assert reader.batch_get_v1(KEYS, indices(range(6))) == ALL
        heads = slice(rank % 2 * 2, rank % 2 * 2 + 2)
        assert torch.equal(quarter.kv_buffer[:, :6], halves[rank // 2].kv_buffer[:, :6, heads])
        reader.close()


def test_states_are_each_ranks_own_and_bound_the_prefix(pool: str, model: str) -> None:
    """A hybrid model restores a prefix only where the state at its end is there, on this rank."""
    host, states = MlaPool("page_first", 8), StatePool("page_first", 8)
    ranks = [backend_of(pool, model, host, is_mla_model=True, tp_size=2, tp_rank=i) for i in range(2)]
    for one in ranks:
        one.register_mem_host_pool_v2(host, PoolName.KV)
        one.register_mem_host_pool_v2(states, PoolName.MAMBA)
    assert ranks[0].batch_set_v1(KEYS, indices(range(6))) == ALL
    saved = PoolTransfer(name=PoolName.MAMBA, keys=[KEYS[1], KEYS[3]], host_indices=torch.tensor([5, 2]))
    assert ranks[0].batch_set_v2([saved]) == {PoolName.MAMBA: [True, True]}
    asked = PoolTransfer(name=PoolName.MAMBA, keys=[""], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    found = ranks[0].batch_exists_v2(KEYS, [asked])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages, found.restorable_prefix_pages) == (4, {"kv": 6, "mamba": 4}, [2, 4])
    assert ranks[1].batch_exists_v2(KEYS, [asked]).restorable_prefix_pages == []
    assert ranks[1].batch_exists_v2(KEYS, []).kv_hit_pages == 6
    for one in ranks:
        one.close()


def test_anchor_without_memory_has_every_page(pool: str, model: str) -> None:
    """It only counts: whether a prefix can be restored is for its side pools to say."""
    anchor, side = MhaPool("page_first", 8), MhaPool("page_first", 8)
    anchor.kv_buffer, anchor.size_per_token = None, 0  # type: ignore[assignment]
    made = backend_of(pool, model, anchor)
    made.register_mem_host_pool_v2(side, PoolName.INDEXER)
    assert made.batch_set_v1(KEYS, indices(range(6))) == made.batch_get_v1(KEYS, indices(range(6))) == ALL
    made.batch_set_v2([PoolTransfer(name=PoolName.INDEXER, keys=KEYS[:2], host_indices=indices(range(2)))])
    found = made.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.INDEXER)])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (2, {"kv": 6, "indexer": 2})
    made.close()


def test_tensors_by_address(pool: str, model: str) -> None:
    """The older interface may name memory by an address and its bytes."""
    made = create(pool, model_name=model)
    source, target = torch.arange(8, dtype=torch.float32), torch.zeros(8)
    assert made.set("k", target_location=source.data_ptr(), target_sizes=32) is True
    found = made.get("k", target.data_ptr(), 32)
    assert found is not None
    assert torch.equal(target, source)
    assert made.batch_set(["a", "b"], target_locations=[source.data_ptr()] * 2, target_sizes=[32, 16]) is True
    assert made.batch_exists(["a", "b", "c"]) == 2
    assert made.get("a", torch.zeros(5)) is None
    made.close()


def test_metrics_are_told_once_and_only_if_wanted(pool: str, model: str) -> None:
    """SGLang asks after each batch and adds up."""
    host = MhaPool("page_first", 8)
    made = backend_of(pool, model, host, enable_storage_metrics=True)
    made.batch_set_v1(KEYS, indices(range(6)))
    made.batch_get_v1(KEYS[:2], indices(range(2)))
    made.batch_get_v1(["none"], indices(range(1)))
    told = made.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([6], [2])
    assert all(rate > 0 for rate in (*told.backup_bandwidth, *told.prefetch_bandwidth))
    assert made.get_stats().backup_pgs == []
    made.close()
    quiet = create(pool, model_name=model)
    assert quiet.get_stats() is None
    quiet.close()


def test_dead_pool_is_misses_not_errors(model: str) -> None:
    """The engine computes then, and goes on."""
    node = NodeProcess("--capacity", "16MiB")
    host = MhaPool("page_first", 8)
    made = backend_of(node.address, model, host, extra={"interface_v1": 1, "timeout_s": 2})
    assert made.batch_set_v1(KEYS, indices(range(6))) == ALL
    node.kill()
    assert made.batch_exists(KEYS) == 0
    assert made.batch_get_v1(KEYS, indices(range(6))) == [False] * 6
    assert made.batch_set_v1(["new"], indices(range(1))) == [False]
    assert made.set("k", torch.ones(3)) is False
    assert made.get("k") is None
    made.close()
    node.stop()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model_name": None}, "names no model"),
        ({"dcp_size": 2, "is_mla_model": True}, "decode context parallelism"),
        ({"extra": {"pool": ""}}, "where the pool is"),
    ],
)
def test_what_is_not_supported_ends_the_start(pool: str, given: dict[str, Any], says: str) -> None:
    """A backend that starts and then stores nothing, or the wrong thing, is worse."""
    with pytest.raises(ConfigError, match=says):
        create(pool, **given)


def test_mistakes_of_the_caller_raise_or_count_as_misses(pool: str, model: str) -> None:
    """A host pool that nobody registered is a bug; indices that don't fit are as SGLang's own backends take them."""
    made = backend_of(pool, model, MhaPool("page_first", 8))
    with pytest.raises(ConfigError, match="no host pool mamba"):
        made.batch_get_v2([PoolTransfer(name=PoolName.MAMBA, keys=KEYS, host_indices=indices(range(6)))])
    with pytest.raises(ConfigError, match="as many tensors"):
        made.batch_set(KEYS, [torch.ones(2)])
    with pytest.raises(ConfigError, match="a location is a tensor"):
        made.set("k", "text")
    assert made.batch_get_v1(KEYS, indices(range(5))) == [False] * 6
    assert made.batch_get_v2([PoolTransfer(name=PoolName.KV, keys=KEYS)]) == {PoolName.KV: [False] * 6}
    made.close()
