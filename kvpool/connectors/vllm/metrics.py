"""Counts as vLLM passes them on: from ranks and scheduler to its log, and to Prometheus."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvpool.connectors.vllm.stats import COUNTS, added, summary

PREFIX = "vllm:kvpool_"


class PoolStats(KVConnectorStats):
    """Counts by name (`COUNTS`)."""

    data: dict[str, float]

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """With another's."""
        self.data = added(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return dict(summary(self.data))

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not self.data


class PoolMetrics(KVConnectorPromMetrics):
    """One counter or gauge for each of `COUNTS`."""

    def __init__(self, config: Any, kinds: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, kinds, labels, values)
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, count in COUNTS.items():
            kind = self._gauge_cls if count.gauge else self._counter_cls
            metric = kind(name=f"{PREFIX}{name}", documentation=f"{count.text}.", labelnames=labels)
            self._metrics[name] = {engine: metric.labels(*some) for engine, some in values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, count in transfer_stats_data.items():
            if name in self._metrics:
                metric = self._metrics[name][engine_idx]
                if COUNTS[name].gauge:
                    metric.set(count)
                else:
                    metric.inc(count)
