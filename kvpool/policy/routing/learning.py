"""What the policies that estimate have in common: the rates, and each worker's workload, kept from the notices."""

from kvpool.policy.routing.estimate import Estimate
from kvpool.policy.routing.values import Ask, Candidate, Observed, Scored, WorkerRef
from kvpool.policy.routing.workload import WorkerOrder, Workload

MAX_REQUESTS = 1 << 16
"""Requests under way that are remembered; the oldest is forgotten first, and weighs nothing from then on."""


class Learning:
    """The notices of `Policy`, heeded."""

    def __init__(self, order: WorkerOrder) -> None:
        self._order = order
        self.estimate = Estimate()
        self._loads: dict[WorkerRef, Workload] = {}
        self._tokens: dict[str, tuple[WorkerRef, int]] = {}
        self._backlog: dict[WorkerRef, int] = {}

    def wait_s(self, candidate: Candidate, seconds: float, now_ns: int) -> tuple[float, float]:
        """How long a newcomer of `seconds` waits there and how long it keeps others waiting, with what other routers sent there."""
        worker = candidate.worker
        load = self._loads.get(worker)
        wait, others = load.wait_s(seconds, now_ns) if load is not None else (0.0, 0.0)
        unknown = candidate.backlog_tokens - self._backlog.get(worker, 0)
        return wait + (self.estimate.compute_s(unknown, 0, worker) if unknown > 0 else 0.0), others

    def routed(self, ask: Ask, scored: Scored, now_ns: int) -> None:
        """See `Policy.routed`."""
        worker, context = scored.worker, ask.prompt_tokens - scored.compute_tokens
        self._given(ask.request_id, worker, scored.compute_tokens, self.estimate.compute_s(scored.compute_tokens, context, worker), now_ns)

    def first_token(self, request_id: str, worker: WorkerRef, observed: Observed, now_ns: int) -> None:
        """See `Policy.first_token`."""
        self.estimate.observe(worker, observed)
        self.ended(request_id, worker, now_ns)

    def ended(self, request_id: str, worker: WorkerRef, now_ns: int) -> None:
        """See `Policy.ended`."""
        known = self._tokens.get(request_id)
        if known is None or known[0] != worker:
            return
        del self._tokens[request_id]
        self._backlog[worker] -= known[1]
        self._loads[worker].remove(request_id, now_ns)

    def forget(self, worker: WorkerRef) -> None:
        """See `Policy.forget`."""
        self.estimate.forget(worker)
        self._loads.pop(worker, None)
        self._backlog.pop(worker, None)
        self._tokens = {name: known for name, known in self._tokens.items() if known[0] != worker}

    def _given(self, request_id: str, worker: WorkerRef, tokens: int, seconds: float, now_ns: int) -> None:
        if len(self._tokens) >= MAX_REQUESTS:
            oldest = next(iter(self._tokens))
            self.ended(oldest, self._tokens[oldest][0], now_ns)
        before = self._tokens.get(request_id)
        if before is not None:
            self.ended(request_id, before[0], now_ns)
        self._tokens[request_id] = worker, tokens
        self._backlog[worker] = self._backlog.get(worker, 0) + tokens
        self._loads.setdefault(worker, Workload(self._order)).add(request_id, seconds, now_ns)
