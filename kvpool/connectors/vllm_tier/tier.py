"""The class that vLLM makes in the scheduler's process: vLLM's jobs become `Jobs`, its lookups are asked by a thread of vLLM's own.

Nothing here waits for the pool but `drain_jobs` and `shutdown`, and these not longer than a call's deadline. A chunk that the pool loses
between lookup and load makes its load fail for that chunk; vLLM keeps the others and computes it.
"""

import json
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
from vllm import __version__ as VLLM
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, OffloadingEvent, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvpool.client.choose import AUTO
from kvpool.client.values import ValueClient
from kvpool.connectors.vllm_tier.jobs import Jobs
from kvpool.errors import ConfigError

log = init_logger("vllm.kvpool")


class Lookups(AsyncLookupManager):
    """Which chunks the pool has, a batch a step, in a thread."""

    def __init__(self, tier_type: str, client: ValueClient) -> None:
        self._client = client
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[bytes], req_context: Any) -> Iterable[bool]:
        """One message to each node that is asked."""
        return self._client.present(keys)


class KvpoolTier(SecondaryTierManager):
    """Chunks of vLLM's host memory in a kvpool. The entries of its config are the arguments behind `tier_type`; raises `ConfigError`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        pool: str = "",
        transport: str = AUTO,
        timeout_s: float = 5.0,
        load_threads: int = 4,
        store_threads: int = 2,
        scope: str = "",
        ttl_s: float = 0.0,
        locality: str | None = None,
        enable_kv_events: bool = False,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not isinstance(pool, str) or not pool:
            raise ConfigError(f'secondary tier {tier_type}: say where the pool is, {{"pool": "host:port"}} or a cluster URL')
        if load_threads < 1 or store_threads < 1:
            raise ConfigError(f"secondary tier {tier_type}: load_threads and store_threads must be positive")
        self.locality = Locality(locality) if locality is not None else None
        self._events: list[OffloadingEvent] | None = None
        if enable_kv_events:
            if not offloading_spec.kv_events_config.enable_kv_cache_events:
                raise ConfigError(f"secondary tier {tier_type}: enable_kv_events needs enable_kv_cache_events in --kv-events-config")
            self._events = []
        rows = np.asarray(primary_kv_view).view(np.uint8)
        self._client = ValueClient(
            pool, scope=[*scope_of(offloading_spec, rows.shape[1]), scope], transport=transport, timeout_s=timeout_s, threads=1
        )
        self._jobs = Jobs(self._client, rows, load_threads=load_threads, store_threads=store_threads, ttl_s=ttl_s)
        self._lookups = Lookups(tier_type, self._client)
        log.info("tier %s: pool %s, chunks of %d bytes", tier_type, pool, rows.shape[1])

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """No wishes."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """RETRY until the pool has been asked."""
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to write chunks to the pool; those that it has cost a message."""
        self._jobs.store(job_metadata.job_id, list(job_metadata.keys), [int(chunk) for chunk in job_metadata.chunk_ids])

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read chunks from the pool into vLLM's host memory."""
        self._jobs.load(job_metadata.job_id, list(job_metadata.keys), [int(chunk) for chunk in job_metadata.chunk_ids])

    def get_finished_jobs(self) -> list[JobResult]:
        """What has ended since the last call; chunks that didn't come are no hits any more for the requests that asked."""
        results: list[JobResult] = []
        for done in self._jobs.finished():
            good = [key for key, there in zip(done.keys, done.good, strict=True) if there]
            if done.load:
                self._lookups.mark_miss([key for key, there in zip(done.keys, done.good, strict=True) if not there])
            elif self._events is not None and good:
                self._events.append(OffloadingEvent(keys=good, medium=self.medium, removed=False, locality=self.locality))
            success = len(good) == len(done.keys)
            results.append(
                JobResult(
                    job_id=done.job_id,
                    success=success,
                    successful_keys=tuple(good) if done.load and not success and good else None,
                    transfer_time=done.took_s,
                    transfer_bytes=len(good) * self.block_size_bytes,
                )
            )
        return results

    def take_events(self) -> list[OffloadingEvent]:
        """Chunks that this process has put into the pool, if vLLM is to publish that. What leaves the pool isn't told."""
        told, self._events = self._events or [], [] if self._events is not None else None
        return told

    def on_request_finished(self, req_context: Any) -> None:
        """Its lookups are forgotten."""
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Ask the pool for what was looked up in this step."""
        self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait for all jobs; their results are there then."""
        self._jobs.drain()

    def shutdown(self) -> None:
        """End threads and connections."""
        self._lookups.shutdown()
        self._jobs.close()
        self._client.close()


def scope_of(offloading_spec: Any, chunk_bytes: int) -> list[str]:
    """What makes equal keys of vLLM's mean unequal bytes: all that vLLM's own file tier has in its paths, and how memory is laid out."""
    mapper = FileMapper.from_offloading_spec(
        root_dir="", offloading_spec=offloading_spec, blocks_per_file=offloading_spec.blocks_per_chunk, parallel_agnostic=True
    )
    layout = getattr(offloading_spec.config, "kv_cache_layout", None)
    return [
        "vllm",
        "tier 1",
        VLLM,
        json.dumps(mapper.get_run_config(), sort_keys=True),
        f"rank {mapper.rank}",
        f"{layout}",
        f"{chunk_bytes}",
    ]
