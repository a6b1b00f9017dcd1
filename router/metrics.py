"""The router's Prometheus metrics, in a registry of their own. Names start with `kvpool_router_`."""

import asyncio
from collections.abc import Iterator, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool.units import SECOND
from router.dispatch import Dispatcher
from router.fleet import Fleet
from router.job import Trace
from router.worker import ROLES

_NAME = "kvpool_router_"
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 20)

OUTCOMES = ("ok", "rejected", "busy", "unavailable", "timeout", "hung_up", "error")


def outcome_of(status: int) -> str:
    """The outcome an error status stands for."""
    return {429: "busy", 503: "unavailable", 504: "timeout"}.get(status, "rejected" if status < 500 else "error")


class Metrics:
    """Counts what happened; never decides."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        fleet = dispatcher.fleet
        self.registry = CollectorRegistry()
        name = _NAME
        registry = self.registry
        self._requests = Counter(name + "requests", "Generation requests by outcome", ["endpoint", "outcome"], registry=registry)
        self._prompt = Counter(name + "prompt_tokens", "Prompt tokens", registry=registry)
        self._cached = Counter(name + "cached_tokens", "Prompt tokens whose KV was not computed", registry=registry)
        self._completion = Counter(name + "completion_tokens", "Generated tokens", registry=registry)
        self._retries = Counter(name + "retries", "Failed attempts that were retried or given up", registry=registry)
        self._fallbacks = Counter(name + "fallbacks", "Requests that took another way than planned", ["reason"], registry=registry)
        ttft = "Seconds from a request's arrival to its first token"
        self._ttft = Histogram(name + "time_to_first_token_seconds", ttft, buckets=_TTFT_BUCKETS, registry=registry)
        gap = "Seconds between consecutive tokens of an answer"
        self._gap = Histogram(name + "inter_token_seconds", gap, buckets=_GAP_BUCKETS, registry=registry)
        self.in_flight = Gauge(name + "in_flight", "Requests being served", registry=registry)
        tasks = Gauge(name + "tasks", "Tasks of the event loop", registry=registry)
        tasks.set_function(lambda: len(asyncio.all_tasks()))
        workers = Gauge(name + "workers_alive", "Live workers by role", ["role"], registry=registry)
        for role in ROLES:
            workers.labels(role).set_function(partial(_alive, fleet, role))
        self.routers_heard = Gauge(name + "routers_heard", "Other routers whose load on workers is known", registry=registry)
        wait = "Seconds a request stood in line for a worker"
        self._waited = Histogram(name + "queue_seconds", wait, buckets=_TTFT_BUCKETS, registry=registry)
        registry.register(_Inside(dispatcher))

    def gap(self, duration_ns: int) -> None:
        """Two consecutive tokens were so far apart."""
        self._gap.observe(duration_ns / SECOND)

    def ended(self, endpoint: str, outcome: str) -> None:
        """A request is over, in one of `OUTCOMES`."""
        self._requests.labels(endpoint, outcome).inc()

    def generated(self, prompt_tokens: int, trace: Trace) -> None:
        """A request that reached the workers is over; count what it used, however it ended."""
        self._prompt.inc(prompt_tokens)
        self._cached.inc(trace.cached_tokens)
        self._completion.inc(len(trace.generated))
        self._retries.inc(trace.retries)
        for reason in trace.fallbacks:
            self._fallbacks.labels(reason).inc()
        self._waited.observe(trace.queued_ns / SECOND)
        if trace.first_token_ns:
            self._ttft.observe(trace.first_token_ns / SECOND)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


def _alive(fleet: Fleet, role: str) -> float:
    return len(fleet.alive(role))


class _Inside(Collector):
    """What the parts of a router count themselves, read when somebody asks."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        entrance, chooser = self._dispatcher.entrance, self._dispatcher.chooser
        yield _gauges("queue_length", "Requests in line for a worker", "kind", entrance.gate.lines)
        yield _counters("rejections", "Requests refused with 429 by the router", "reason", entrance.counts.refused)
        shared = entrance.shared.counts
        flights = {name: getattr(shared, name) for name in ("led", "followed", "abroad", "promoted", "overdue")}
        yield _counters("single_flight", "Requests that computed a prefix for all, and that waited for one", "part", flights)
        yield _counters("skipped_prefills", "Requests that needed no prefill worker", "", {"": entrance.counts.direct})
        fetch = entrance.prefetcher.counts
        fetched = {"waits": fetch.waits, "blocks": fetch.blocks, "failed": fetch.failed, "skipped": fetch.skipped}
        yield _counters("prefetch", "What was fetched for requests in line", "what", fetched)
        yield _counters(
            "feed_events", "What came by the feeds of the index, and what went wrong", "what", self._dispatcher.holdings.counts()
        )
        yield _prices(self._dispatcher)
        choices = CounterMetricFamily(_NAME + "choices", "Choices of a worker, by what decided", labels=["policy", "role", "by"])
        for (role, why), count in sorted(chooser.chosen.items()):
            choices.add_metric([chooser.policy, role, why], count)
        yield choices


def _prices(dispatcher: Dispatcher) -> Metric:
    what = "Tokens to compute again for each token that comes into a memory that is full, by whose memory it is"
    family = GaugeMetricFamily(_NAME + "memory_price", what, labels=["role", "id"])
    workers = (worker.ref for role in ROLES for worker in dispatcher.fleet.alive(role))
    for ref in (*workers, *dispatcher.holdings.nodes()):
        family.add_metric([ref.role, ref.id], dispatcher.holdings.pressure(ref).price)
    return family


def _counters(name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(_NAME + name, what, labels=[label] if label else [])
    for value, count in values.items():
        family.add_metric([value] if label else [], count)
    return family


def _gauges(name: str, what: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(_NAME + name, what, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
