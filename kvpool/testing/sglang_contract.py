"""SGLang's storage contract, many random operations against a dictionary: `python -m kvpool.testing.sglang_contract POOL SEED OPERATIONS`.

The backend is made as SGLang makes it, by its own `StorageBackendFactory` where the package is, by `sglang_twin.py` where it isn't. A model
remembers for every key the first bytes that it got, because values never change, and each answer has to be the model's.
"""

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvpool.testing.sglang_pools import MhaPool, MlaPool, StatePool

KEYS = [f"{i:064x}" for i in range(40)]
PAGES = 24
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")


def config_of(pool: str, **given: Any) -> Any:
    """What SGLang tells a backend of one rank; `extra` goes to the extra config."""
    extra = {"backend_name": "kvpool", "module_path": "kvpool.connectors.sglang", "class_name": "KvpoolHiCache", "pool": pool}
    plain = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "m",
    }  # fmt: skip
    return HiCacheStorageConfig(
        **{**plain, **{k: v for k, v in given.items() if k != "extra"}}, extra_config=extra | given.get("extra", {})
    )


def create(pool: str, **given: Any) -> Any:
    """A backend by the factory."""
    return StorageBackendFactory.create_backend("dynamic", config_of(pool, **given), None)


class Contract:
    """One backend with its host pools, a model of what it should hold, and operations on both.

    `by_pages`: whether the engine reads the KV by `batch_get_v1`, so that pages which were written that way exist.
    """

    def __init__(self, backend: Any, kv: Any, states: Any, seed: int, *, by_pages: bool) -> None:
        self.backend = backend
        self.by_pages = by_pages
        self.dice = random.Random(seed)
        self.pools: dict[str, Any] = {"kv": kv, "indexer": MhaPool("page_first", PAGES), "mamba": states}
        self.tensors: dict[str, torch.Tensor] = {}
        self.pages: dict[str, dict[str, bytes]] = {name: {} for name in self.pools}
        self.counts: dict[str, int] = {}
        backend.register_mem_pool_host(kv)
        for name, pool in self.pools.items():
            backend.register_mem_host_pool_v2(pool, PoolName(name))
        if hasattr(backend, "on_host_pools_registered"):
            backend.on_host_pools_registered()

    def run(self, operations: int) -> dict[str, int]:
        """So many random operations; how many there were of each kind. `AssertionError` where the backend is wrong."""
        kinds: list[Callable[[], None]] = [
            self._set, self._get, self._exists, self._batch_set, self._batch_get, self._batch_exists, self._set_v1, self._get_v1,
            self._exists_v2, self._set_v2, self._get_v2,
        ]  # fmt: skip
        for number in range(operations):
            kind = self._clear if number and self.dice.random() < 0.002 else self.dice.choice(kinds)
            try:
                kind()
            except Exception as error:
                raise AssertionError(f"operation {number}, {kind.__name__}: {error!r}") from error
            name = kind.__name__.removeprefix("_")
            self.counts[name] = self.counts.get(name, 0) + 1
        return self.counts

    # Tensors by key

    def _set(self) -> None:
        key = self._key()
        tensor = self._tensor(key)
        assert self.backend.set(key, tensor) is True
        self.tensors.setdefault(key, tensor)

    def _get(self) -> None:
        key = self._key()
        wanted = self.tensors.get(key)
        target = self._target(wanted)
        _same(self.backend.get(key, target), wanted, target)
        _same(self.backend.get(key), wanted, None)

    def _exists(self) -> None:
        key = self._key()
        assert self.backend.exists(key) is self._there(key)

    def _batch_set(self) -> None:
        keys = self._some()
        tensors = [self._tensor(key) for key in keys]
        assert self.backend.batch_set(keys, tensors) is True
        for key, tensor in zip(keys, tensors, strict=True):
            self.tensors.setdefault(key, tensor)

    def _batch_get(self) -> None:
        keys = self._some()
        wanted = [self.tensors.get(key) for key in keys]
        targets = [self._target(one) for one in wanted]
        for found, one, target in zip(self.backend.batch_get(keys, targets), wanted, targets, strict=True):
            _same(found, one, target)

    def _batch_exists(self) -> None:
        keys = self._some()
        there = [self._there(key) for key in keys]
        assert self.backend.batch_exists(keys) == ([*there, False]).index(False)

    # Pages

    def _set_v1(self) -> None:
        keys, indices = self._filled("kv")
        assert self.backend.batch_set_v1(keys, indices) == [True] * len(keys)

    def _get_v1(self) -> None:
        keys, indices = self._blank("kv")
        self._check("kv", keys, indices, self.backend.batch_get_v1(keys, indices))

    def _set_v2(self) -> None:
        transfers = []
        for name in self._some_pools():
            keys, indices = self._filled(name)
            transfers.append(PoolTransfer(name=PoolName(name), keys=keys, host_indices=indices))
        done = self.backend.batch_set_v2(transfers)
        assert done == {one.name: [True] * len(one.keys) for one in transfers}

    def _get_v2(self) -> None:
        transfers = []
        for name in self._some_pools():
            keys, indices = self._blank(name)
            transfers.append(PoolTransfer(name=PoolName(name), keys=keys, host_indices=indices))
        came = self.backend.batch_get_v2(transfers)
        assert set(came) == {one.name for one in transfers}
        for one in transfers:
            self._check(str(one.name.value), one.keys, one.host_indices, came[one.name])

    def _exists_v2(self) -> None:
        keys = self._some()
        transfers = [
            PoolTransfer(name=PoolName.INDEXER),
            PoolTransfer(name=PoolName.MAMBA, keys=[""] * self.dice.choice((1, 2)), hit_policy=PoolHitPolicy.TRAILING_PAGES),
        ][: self.dice.randrange(3)]
        kv = ([*(self._there(key) for key in keys), False]).index(False)
        good = set(range(1, kv + 1))
        for one in transfers:
            held, window = self.pages[str(one.name.value)], len(one.keys or ()) if one.name == PoolName.MAMBA else len(keys)
            good &= {n for n in range(1, kv + 1) if all(key in held for key in keys[:n][-window:])}
        found = self.backend.batch_exists_v2(keys, transfers)
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (max(good, default=0), sorted(good))
        assert found.extra_pool_hit_pages.get(PoolName.KV, 0) == kv

    def _clear(self) -> None:
        self.backend.clear()
        self.tensors.clear()
        for held in self.pages.values():
            held.clear()

    # Helpers

    def _there(self, key: str) -> bool:
        return key in self.tensors or (self.by_pages and key in self.pages["kv"])

    def _key(self) -> str:
        return self.dice.choice(KEYS)

    def _some(self) -> list[str]:
        """A stretch of keys, as a prompt has them, or any in any order."""
        count = self.dice.randrange(1, 13)
        start = self.dice.randrange(len(KEYS) - count)
        return KEYS[start : start + count] if self.dice.random() < 0.7 else self.dice.sample(KEYS, count)

    def _some_pools(self) -> list[str]:
        return self.dice.sample(sorted(self.pools), self.dice.randrange(1, 4))

    def _tensor(self, key: str) -> torch.Tensor:
        """Other bytes each time; of one shape a key."""
        shape = (int(key, 16) % 3 + 1, 5)
        return torch.randint(0, 30000, shape, dtype=torch.int16, generator=self._generator()).view(torch.bfloat16)

    def _target(self, wanted: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(wanted) if wanted is not None else torch.zeros(7, dtype=torch.float32)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.dice.randrange(1 << 30))

    def _slots(self, count: int, page_size: int) -> torch.Tensor:
        """The indices of so many pages anywhere in a host pool."""
        pages = torch.tensor(self.dice.sample(range(PAGES), count))
        return (pages[:, None] * page_size + torch.arange(page_size)).reshape(-1)

    def _filled(self, name: str) -> tuple[list[str], torch.Tensor]:
        """Pages of a host pool with random bytes, under some keys; the model keeps the first of each."""
        pool, keys = self.pools[name], self._some()
        indices = self._slots(len(keys), pool.page_size)
        for key, at in zip(keys, indices.tolist()[:: pool.page_size], strict=True):
            page = pool.get_dummy_flat_data_page().view(torch.uint8)
            page.copy_(torch.randint(0, 120, page.shape, dtype=torch.uint8, generator=self._generator()))
            pool.set_from_flat_data_page(at, page.view(pool.get_dummy_flat_data_page().dtype))
            self.pages[name].setdefault(key, _bytes(pool.get_data_page(at)))
        return keys, indices

    def _blank(self, name: str) -> tuple[list[str], torch.Tensor]:
        """Pages of a host pool with nothing in them, for some keys."""
        pool, keys = self.pools[name], self._some()
        indices = self._slots(len(keys), pool.page_size)
        for at in indices.tolist()[:: pool.page_size]:
            pool.set_from_flat_data_page(at, pool.get_dummy_flat_data_page())
        return keys, indices

    def _check(self, name: str, keys: list[str], indices: torch.Tensor, came: list[bool]) -> None:
        """Exactly what the model has came, with the right bytes."""
        pool, held = self.pools[name], self.pages[name]
        assert came == [key in held for key in keys]
        for key, at, there in zip(keys, indices.tolist()[:: pool.page_size], came, strict=True):
            assert not there or _bytes(pool.get_data_page(at)) == held[key]


def _bytes(page: torch.Tensor) -> bytes:
    return page.contiguous().view(torch.uint8).numpy().tobytes()


def _same(found: torch.Tensor | None, wanted: torch.Tensor | None, target: torch.Tensor | None) -> None:
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert target is None or found is target
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def run(pool: str, seed: int, operations: int) -> dict[str, int]:
    """The contract with a layout and an interface that the seed chooses, for a model of its own."""
    layout = LAYOUTS[seed % len(LAYOUTS)]
    by_pages = seed % 5 != 4
    mla = bool(seed // len(LAYOUTS) % 2) and layout != "page_head"
    backend = create(pool, model_name=f"contract-{seed}", is_mla_model=mla, extra={"interface_v1": int(by_pages)})
    try:
        kv: Any = MlaPool(layout, PAGES) if mla else MhaPool(layout, PAGES)
        states = StatePool("layer_first" if seed % 3 == 0 else "page_first", PAGES)
        return Contract(backend, kv, states, seed, by_pages=by_pages).run(operations)
    finally:
        backend.close()


if __name__ == "__main__":
    address, first, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for one in range(first, first + int(sys.argv[4]) if len(sys.argv) > 4 else first + 1):
        print(one, sum(run(address, one, each).values()), flush=True)
