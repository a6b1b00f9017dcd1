"""The class that vLLM loads: it hands vLLM's calls to the scheduler's side or to the rank's, and says nothing of its own.

vLLM makes one in the scheduler's process and one on each rank. The ranks know what their KV is, so they say it to the scheduler when the
engine starts (`get_handshake_metadata`), and it asks the pool for what all of them have.
"""

import os
import time
from collections.abc import Iterable
from typing import Any

from vllm import __version__ as VLLM
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvpool.connectors.vllm.events import stored_events
from kvpool.connectors.vllm.facts import adapter_digest, check_groups, check_parallel
from kvpool.connectors.vllm.link import PoolLink
from kvpool.connectors.vllm.messages import RankFacts, StepPlan, StepReport, distinct
from kvpool.connectors.vllm.metrics import PoolMetrics, PoolStats
from kvpool.connectors.vllm.rank import open_rank
from kvpool.connectors.vllm.scheduler import Scheduler, Shape
from kvpool.connectors.vllm.settings import Settings, check_policy
from kvpool.connectors.vllm.versions import check_version, hashes_are_shared
from kvpool.connectors.vllm.worker import Worker
from kvpool.errors import ConfigError
from kvpool.wire.credentials import Security

log = init_logger("vllm.kvpool")
_DRAIN_S = 5.0


class PlanMetadata(KVConnectorMetadata):
    """A plan, in what vLLM carries to the ranks."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class ReportMetadata(KVConnectorWorkerMetadata):
    """A report, in what vLLM carries to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """This and another rank's."""
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.merged(other.report))


class FactsMetadata(KVConnectorHandshakeMetadata):
    """A rank's facts, in what vLLM carries to the scheduler."""

    def __init__(self, facts: RankFacts) -> None:
        self.facts = facts


class KvpoolConnector(KVConnectorBase_V1, SupportsHMA):
    """See `docs/vllm.md`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config)
        check_version(VLLM, untested=self._settings.untested_vllm)
        check_policy(transfer.kv_load_failure_policy, self._settings)
        check_groups(kv_cache_config.kv_cache_groups)
        check_parallel(vllm_config.parallel_config)
        self._security = Security.from_environment()
        self._link: PoolLink | None = None
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._facts: RankFacts | None = None
        if role == KVConnectorRole.SCHEDULER:
            shape = _shape(vllm_config, kv_cache_config)
            if shape.ranks > 1 and self._settings.load in ("sync", "layers"):
                raise ConfigError(f'"load":"{self._settings.load}" is for one rank, and there are {shape.ranks}; use "auto" or "async"')
            self._scheduler = Scheduler(shape, self._settings, adapter_digest)

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, nothing else."""
        return False

    # The scheduler's process

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """The ranks have said what their KV is."""
        assert self._scheduler is not None
        parts = distinct({place: one.facts for place, one in metadata.items() if isinstance(one, FactsMetadata)})
        if parts:
            self._link = self._open(parts[0])
            self._scheduler.connect(self._link, [one.namespace.root() for one in parts], max(one.block_bytes for one in parts))
            log.info("kvpool at %s: %d part(s), namespace %s", self._settings.pool, len(parts), parts[0].namespace.fingerprint().hex())

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The engine's blocks are there."""
        assert self._scheduler is not None
        self._scheduler.bind(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What the pool has of a request."""
        assert self._scheduler is not None
        return self._scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request has its blocks."""
        assert self._scheduler is not None
        self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The step's plan."""
        assert self._scheduler is not None
        state = scheduler_output.kv_connector_block_state
        plan = self._scheduler.plan(
            list(_scheduled(scheduler_output)),
            lambda request_id: state.get_block_ids(request_id)[0],
            scheduler_output.total_num_scheduled_tokens,
            time.monotonic_ns(),
        )
        return PlanMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the ranks got done."""
        assert self._scheduler is not None
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, ReportMetadata):
            self._scheduler.reported(report.report, time.monotonic_ns())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over. Its blocks are held by what saves them, not by it."""
        assert self._scheduler is not None
        self._scheduler.ended(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The same, as it is called with the hybrid KV cache manager."""
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        """Steps go on until all saves are reported."""
        return self._scheduler is not None and self._scheduler.saving

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free by waiting."""
        return self._scheduler is not None and self._scheduler.saving

    def take_events(self) -> Iterable[Any]:
        """What the pool has taken since the last call."""
        assert self._scheduler is not None
        stories, self._scheduler.stories = self._scheduler.stories, []
        return stored_events(stories, self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)

    def reset_cache(self) -> bool | None:
        """Use none of the blocks that were saved so far, nor give new ones to engines that weren't reset."""
        assert self._scheduler is not None
        self._scheduler.reset(os.urandom(16))
        return True

    # A rank

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The engine's KV is there."""
        self._facts, pages, saves = open_rank(self._vllm_config, self._kv_cache_config, kv_caches, VLLM, self._settings, self._security)
        self._link = self._open(self._facts)
        self._worker = Worker(self._facts.namespace.root(), pages, self._link, self._settings, saves=saves)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this rank's KV is."""
        return None if self._facts is None else FactsMetadata(self._facts)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, PlanMetadata):
            self._worker.bind(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        if self._worker is not None:
            self._worker.start_loads(forward=forward_context.attn_metadata is not None)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Before a layer is read."""
        if self._worker is not None:
            self._worker.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a block is saved as a whole, when its step is over (`docs/vllm.md` says why)."""

    def wait_for_save(self) -> None:
        """The step is over: begin its saves."""
        if self._worker is not None:
            self._worker.finish_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose loads are over."""
        return None, (self._worker.received() or None) if self._worker is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose loads failed."""
        return self._worker.invalid_blocks() if self._worker is not None else set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What got done."""
        report = self._worker.report() if self._worker is not None else None
        return None if report is None else ReportMetadata(report)

    # Both

    def get_kv_connector_stats(self) -> Any:
        """Counts since the last call."""
        side = self._worker if self._worker is not None else self._scheduler
        return PoolStats(data=side.counts()) if side is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Counts that came over a wire."""
        return PoolStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> Any:
        """For `/metrics`."""
        return PoolMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Waiting for layers takes Python between them."""
        return extra_config.get("load") == "layers"

    def shutdown(self) -> None:
        """Finish what runs, disconnect."""
        if self._worker is not None:
            self._worker.drain(_DRAIN_S)
        if self._link is not None:
            self._link.close()
            self._link = None

    def _open(self, facts: RankFacts) -> PoolLink:
        settings = self._settings
        return PoolLink(settings.pool, facts.namespace, transport=settings.transport, lookup_s=settings.lookup_s, security=self._security)


def _shape(config: Any, kv_cache_config: Any) -> Shape:
    transfer, events = config.kv_transfer_config, config.kv_events_config
    return Shape(
        block_tokens=check_groups(kv_cache_config.kv_cache_groups),
        ranks=config.parallel_config.world_size,
        loads=transfer.is_kv_consumer,
        saves=transfer.is_kv_producer,
        always_hand_off=not transfer.is_kv_consumer,
        by_hash=hashes_are_shared(VLLM, config.cache_config.prefix_caching_hash_algo, os.environ),
        events=events is not None and events.enable_kv_cache_events,
    )


def _scheduled(output: Any) -> Iterable[tuple[str, int]]:
    """Each request of a step, and how many of its tokens have KV when it is over."""
    tokens = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + tokens[new.req_id]
    running = output.scheduled_cached_reqs
    for request_id, computed in zip(running.req_ids, running.num_computed_tokens, strict=True):
        yield request_id, computed + tokens[request_id]
