"""The class that SGLang's `StorageBackendFactory` makes, one on each rank: it hands SGLang's calls to pages and tensors of the pool.

SGLang calls it from its prefetch and its backup thread. What the pool hasn't, can't take, or doesn't answer in time is a False or a shorter
prefix: SGLang computes it then.
"""

import logging
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.version import __version__ as SGLANG

from kvpool.client.values import ValueClient
from kvpool.connectors.sglang import hits, names
from kvpool.connectors.sglang.pages import Pages, page_size_of, pages_of
from kvpool.connectors.sglang.settings import Settings
from kvpool.connectors.sglang.traffic import Traffic
from kvpool.connectors.sglang.whole import WholeTensors, as_tensor
from kvpool.errors import ConfigError

log = logging.getLogger(__name__)

_SCOPE = ("sglang", "hicache", "1")


class KvpoolHiCache(HiCacheStorage):
    """Pages of a HiCache in a kvpool. `storage_config.extra_config` is as `settings.py` says. Raises `ConfigError`."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self.settings = Settings.parse(storage_config.extra_config)
        if not storage_config.model_name:
            raise ConfigError("this engine names no model, so its pages can't be told from another's; start it with --served-model-name")
        if storage_config.dcp_size > 1:
            raise ConfigError("decode context parallelism is not supported by this storage backend; SGLang takes file or mooncake for it")
        self.config = storage_config
        self.traffic = Traffic()
        self.mem_pool_host: Any = None
        self.registered_pools: dict[str, Any] = {}
        self._generation = 0
        self._pages: dict[str, Pages] = {}
        scope = [*_SCOPE, SGLANG, storage_config.model_name, self.settings.scope]
        self.client = ValueClient(
            self.settings.pool, scope=scope, transport=self.settings.transport, timeout_s=self.settings.timeout_s, threads=1
        )
        self._whole = self._whole_tensors()
        log.info("HiCache storage in the pool %s, model %s", self.settings.pool, storage_config.model_name)

    # Host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The host pool of the KV."""
        self.mem_pool_host = mem_pool_host
        self._pages[names.ANCHOR] = self._pages_of(names.ANCHOR, mem_pool_host)
        self._whole = self._whole_tensors()

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Another host pool of a hybrid model; the one of the KV is known already."""
        name = str(host_pool_name)
        self.registered_pools[name] = host_pool
        if name != names.ANCHOR or self.mem_pool_host is None:
            self._pages[name] = self._pages_of(name, host_pool)

    # Pages of the host pools

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages the pool has."""
        return hits.leading(self._present(keys))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """Read pages of the KV into the host pool; which came."""
        return self._move("prefetch", names.ANCHOR, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        """Write pages of the KV from the host pool; which the pool has now."""
        return self._move("backup", names.ANCHOR, keys, host_indices)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> PoolTransferResult:
        """The longest prefix that every host pool can serve, and how far each could."""
        kv_pages = hits.leading(self._present(keys))
        found: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        lengths = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if not lengths:
                break
            there = self._there([self._named(transfer.name).names(key) for key in keys[:kv_pages]])
            policy = PoolHitPolicy(transfer.hit_policy).value
            served = hits.servable(policy, there, len(transfer.keys or ()))
            if served:
                found[transfer.name] = served[-1]
            lengths = [n for n in lengths if n in set(served)]
        return PoolTransferResult(lengths[-1] if lengths else 0, found, lengths)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        """Read pages of several host pools; which came, by pool."""
        return {one.name: self._move("prefetch", one.name, one.keys or [], one.host_indices) for one in transfers}

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        """Write pages of several host pools; which the pool has now, by pool."""
        return {one.name: self._move("backup", one.name, one.keys or [], one.host_indices) for one in transfers}

    # Tensors by key

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill `target_location` (a tensor, or an address with `target_sizes` bytes), or a new tensor; None when it isn't there."""
        return self.batch_get([key], None if target_location is None else [target_location], [target_sizes])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        """`get` of many."""
        return self._whole.get(keys, [None] * len(keys) if target_locations is None else _tensors(keys, target_locations, target_sizes))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Keep a tensor, given as `value` or by its place as for `get`; True when the pool has one of that key, old or new."""
        given = target_location if value is None else value
        return all(self._whole.put([key], _tensors([key], [given], [target_sizes])))

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        """`set` of many; whether all are there."""
        given = target_locations if values is None else values
        return all(self._whole.put(keys, _tensors(keys, given, target_sizes)))

    def exists(self, key: str) -> bool:
        """Whether the pool has a page or a tensor of this key."""
        return self._present([key])[0]

    # The rest

    def clear(self) -> None:
        """From now on nothing is found that was stored before, by this process; the pool lets go of it as of whatever isn't used."""
        self._generation += 1
        self._whole = self._whole_tensors()
        self._pages = {name: self._pages_of(name, self._pool(name)) for name in self._pages}
        log.warning("pages stored before are not looked for any more by this process; the pool drops them when it needs the room")

    def get_stats(self) -> Any:
        """SGLang's `StorageMetrics` of what moved since the last call; None without `enable_storage_metrics`."""
        if not self.config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return self.traffic.drain_into(StorageMetrics())

    def close(self) -> None:
        """Disconnect, once calls have ended."""
        self.client.close()

    def _present(self, keys: Sequence[str]) -> list[bool]:
        """Which keys have a page of the KV in the form that this engine reads, or a tensor."""
        pages = self._pages.get(names.ANCHOR)
        tensors = [[self._whole.name(key)] for key in keys]
        if pages is None or not self.settings.interface_v1:
            return self._there(tensors)
        as_pages = [pages.names(key) for key in keys]
        there = self._there([*as_pages, *tensors])
        return [page or tensor for page, tensor in zip(there[: len(keys)], there[len(keys) :], strict=True)]

    def _there(self, groups: Sequence[Sequence[bytes]]) -> list[bool]:
        """Of which groups of values the pool has every one."""
        present = iter(self.client.present([name for group in groups for name in group]))
        return [all(list(islice(present, len(group)))) for group in groups]

    def _move(self, way: str, pool_name: str, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Read (`prefetch`) or write (`backup`) pages of one host pool; nothing when the indices don't fit the keys."""
        pages, page_size = self._named(pool_name), page_size_of(self._pool(str(pool_name)))
        if indices is None or indices.numel() != len(keys) * page_size:
            count = 0 if indices is None else indices.numel()
            log.error("%s of host pool %s: %d pages of %d need as many indices, got %d", way, pool_name, len(keys), page_size, count)
            return [False] * len(keys)
        if not keys:
            return []
        began_ns = time.monotonic_ns()
        reads, ttl_s = way == "prefetch", self.settings.ttl_s
        done = pages.read(self.client, keys, indices) if reads else pages.write(self.client, keys, indices, ttl_s)
        if self.config.enable_storage_metrics:
            self.traffic.add(way, sum(done), sum(done) * pages.nbytes, time.monotonic_ns() - began_ns)
        return done

    def _named(self, pool_name: str) -> Pages:
        try:
            return self._pages[str(pool_name)]
        except KeyError:
            raise ConfigError(f"no host pool {pool_name} was registered; those that were: {', '.join(self._pages)}") from None

    def _pool(self, name: str) -> Any:
        return self.mem_pool_host if name == names.ANCHOR and self.mem_pool_host is not None else self.registered_pools[name]

    def _pages_of(self, name: str, pool: Any) -> Pages:
        first_page = torch.arange(page_size_of(pool), dtype=torch.int64)
        return pages_of(self.config, name, pool, first_page, generation=self._generation)

    def _whole_tensors(self) -> WholeTensors:
        parts = names.parts_of(self.config, "tensors", None)
        interface = f"interface={int(self.settings.interface_v1)} page-first={int(self.config.is_page_first_layout)}"
        facts = [] if self.mem_pool_host is None else names.facts_of(self.config, names.ANCHOR, self.mem_pool_host, ())
        prefix = names.prefix_of(["tensors", interface, *facts, *parts, f"generation={self._generation}"])
        return WholeTensors(self.client, prefix, self.settings.ttl_s)


def _tensors(keys: Sequence[str], given: Sequence[Any] | None, sizes: Sequence[Any] | None) -> list[torch.Tensor]:
    """Locations as tensors, one a key."""
    if given is None or len(given) != len(keys) or (sizes is not None and len(sizes) != len(keys)):
        raise ConfigError(f"{len(keys)} keys need as many tensors or locations")
    return [as_tensor(one, size) for one, size in zip(given, sizes or [None] * len(keys), strict=True)]
