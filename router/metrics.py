"""The router's Prometheus metrics, in a registry of their own. Names start with `kvpool_router_`."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvpool.units import SECOND
from router.fleet import Fleet
from router.job import Trace
from router.worker import ROLES

_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120)
_GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 20)

OUTCOMES = ("ok", "rejected", "busy", "unavailable", "timeout", "hung_up", "error")


def outcome_of(status: int) -> str:
    """The outcome an error status stands for."""
    return {429: "busy", 503: "unavailable", 504: "timeout"}.get(status, "rejected" if status < 500 else "error")


class Metrics:
    """Counts what happened; never decides."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        name = "kvpool_router_"
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
        workers = Gauge(name + "workers_alive", "Live workers by role", ["role"], registry=registry)
        for role in ROLES:
            workers.labels(role).set_function(partial(_alive, fleet, role))

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
        if trace.first_token_ns:
            self._ttft.observe(trace.first_token_ns / SECOND)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)


def _alive(fleet: Fleet, role: str) -> float:
    return len(fleet.alive(role))
