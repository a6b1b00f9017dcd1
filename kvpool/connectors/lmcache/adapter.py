"""LMCache's `L2AdapterInterface` on the pool: its chunks are opaque values, from and into LMCache's own memory.

Three lanes, so that a long store delays no lookup: stores, lookups, loads, each with the eventfd that LMCache polls. Trouble of the pool is
a miss or a store that failed, never an exception and never a wait beyond `timeout_s`.

What LMCache calls a lock isn't one here. A value that was found may leave before it is loaded; then the load misses it, and the engine
computes that chunk. So there is nothing to unlock.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import lmcache
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from kvpool.connectors.lmcache.connection import Connection
from kvpool.connectors.lmcache.lane import Lane
from kvpool.connectors.lmcache.names import PLAIN, Key, Layout, layout_of, layouts_of, name_of
from kvpool.connectors.lmcache.settings import Settings

log = logging.getLogger(__name__)

_SCOPE = ("lmcache", "kvpool/lmcache/v1")


class KvpoolL2(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not there when this is checked
    """Made by LMCache from `adapter_params`; see `Settings`. Values are found by the same version of LMCache with the same `scope`."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        super().__init__()
        self._settings = settings = Settings.of(params)
        self._pool = Connection(settings, (*_SCOPE, lmcache.__version__, settings.scope))
        self._stores = Lane[L2StoreResult]("store", waiting=settings.waiting, patience_s=settings.timeout_s)
        self._lookups = Lane[Bitmap]("lookup", waiting=settings.waiting, patience_s=settings.timeout_s)
        self._loads = Lane[Bitmap]("load", waiting=settings.waiting, patience_s=settings.timeout_s)
        self._packed: set[bool] = set()
        """Whether objects are packed into plain bytes, as far as they were seen: a lookup doesn't say."""
        self._counts = dict.fromkeys(("stored", "not_stored", "found", "not_found", "loaded", "not_loaded"), 0)

    def get_store_event_fd(self) -> int:
        """Readable when stores have ended."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when lookups have ended."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """Readable when loads have ended."""
        return self._loads.fd

    def submit_store_task(self, keys: Sequence[Key], objects: Sequence[Any]) -> int:
        """Store objects; the task's number. It has succeeded when the pool has all of them then."""
        keys, objects = list(keys), list(objects)
        return self._stores.submit(lambda: self._store(keys, objects), lambda: L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Results of stores by their tasks, once."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(self, keys: Sequence[Key], group_layout_descs: Mapping[int, Layout]) -> int:
        """Look objects up; the task's number."""
        keys, layouts = list(keys), dict(group_layout_descs)
        return self._lookups.submit(lambda: self._lookup(keys, layouts), lambda: Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """A bit for each key that was found, once; None before the end of the task."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: Sequence[Key]) -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: Sequence[Key], objects: Sequence[Any]) -> int:
        """Fill objects; the task's number."""
        keys, objects = list(keys), list(objects)
        return self._loads.submit(lambda: self._load(keys, objects), lambda: Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """A bit for each object that was filled, once; None before the end of the task."""
        return self._loads.pop(task_id)

    def report_status(self) -> dict[str, Any]:
        """For LMCache's status page: sound while tasks are being done, even where the pool is away."""
        lanes = {"stores": self._stores, "lookups": self._lookups, "loads": self._loads}
        given_up = {f"{name}_given_up": lane.given_up for name, lane in lanes.items()}
        healthy = all(lane.alive for lane in lanes.values())
        return {"is_healthy": healthy, "type": "kvpool", "pool": self._settings.pool, **self._counts, **given_up}

    def close(self) -> None:
        """End; objects of LMCache's are not touched any more. A second call does nothing."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        self._pool.close()

    def _store(self, keys: list[Key], objects: list[Any]) -> L2StoreResult:
        client = self._pool.client()
        if client is None:
            return L2StoreResult(False, 0)
        held = client.put(self._names(keys, objects), [one.byte_array for one in objects], ttl_s=self._settings.ttl_s)
        sizes = [one.get_size() for one in objects]
        there = [i for i, has in enumerate(held) if has]
        self._count("stored", "not_stored", held)
        if there:
            self._notify_keys_stored([keys[i] for i in there], [sizes[i] for i in there])
        return L2StoreResult(len(there) == len(keys), sum(sizes[i] for i in there))

    def _lookup(self, keys: list[Key], layouts: Mapping[int, Layout]) -> Bitmap:
        client = self._pool.client()
        if client is None:
            return Bitmap(len(keys))
        computed, found = layouts_of(keys, layouts), [False] * len(keys)
        for packed in (False, True):
            left = [i for i, there in enumerate(found) if not there]
            if left and (packed in self._packed or not self._packed):
                names = [name_of(keys[i], PLAIN if packed else computed[i]) for i in left]
                for i, there in zip(left, client.present(names), strict=True):
                    found[i] = there
        self._count("found", "not_found", found)
        return self._told(keys, found)

    def _load(self, keys: list[Key], objects: list[Any]) -> Bitmap:
        client = self._pool.client()
        if client is None:
            return Bitmap(len(keys))
        came = client.get(self._names(keys, objects), [one.byte_array for one in objects])
        self._count("loaded", "not_loaded", came)
        return _bits(came)

    def _names(self, keys: list[Key], objects: list[Any]) -> list[bytes]:
        layouts = [_layout(one.metadata) for one in objects]
        self._packed.update(layout == PLAIN for layout in layouts)
        return [name_of(key, layout) for key, layout in zip(keys, layouts, strict=True)]

    def _told(self, keys: list[Key], found: list[bool]) -> Bitmap:
        """The bits, after LMCache's listeners were told of a use."""
        used = [key for key, there in zip(keys, found, strict=True) if there]
        if used:
            self._notify_keys_accessed(used)
        return _bits(found)

    def _count(self, good: str, bad: str, done: Sequence[bool]) -> None:
        self._counts[good] += sum(done)
        self._counts[bad] += len(done) - sum(done)


def _layout(metadata: Any) -> str:
    return layout_of(metadata.shapes, metadata.dtypes) if metadata.shapes else layout_of([metadata.shape], [metadata.dtype])


def _bits(done: Sequence[bool]) -> Bitmap:
    bits = Bitmap(len(done))
    for i, good in enumerate(done):
        if good:
            bits.set(i)
    return bits
