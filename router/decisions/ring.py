"""The last requests' choices, kept in memory and bounded.

A job is one answer under way; a request has as many jobs as answers were asked for, and a job as many notes as choices were made for it:
prefill, the plan to decode, decode, and again after every failure. A request can be asked for by the id its caller knows (`x-request-id`)
or by the id of its answer. The oldest request leaves when there are too many; the newest notes of one job are dropped when it has
too many, for the first choices explain the later ones. Nothing here is text or token ids: a ranking has counts and seconds only.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from kvpool.clock import Clock
from kvpool.policy.routing.values import Ask, Ranking, WorkerRef
from router.api.shapes import extension_of
from router.job import Trace

MAX_REQUESTS = 1024
MAX_NOTES = 16
"""Choices kept per job."""
MAX_CANDIDATES = 16
"""Candidates kept per choice, best first; the chosen one is kept besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One choice: when (nanoseconds, monotonic), for which phase, what was asked, the candidates, and who was chosen (None: nobody)."""

    at_ns: int
    role: str
    ask: Ask
    ranking: Ranking
    chosen: WorkerRef | None
    left_out: int
    """Candidates that are not in `ranking` any more."""


@dataclass(slots=True, kw_only=True)
class Explained:
    """One job: its choices in order, how many more were made and not kept, and what happened."""

    job_id: str
    arrived_ns: int
    trace: Trace | None
    """While it runs."""
    notes: list[Note] = field(default_factory=list)
    dropped: int = 0
    outcome: dict[str, Any] | None = None
    """What became of it, once it has ended; holds no tokens."""


@dataclass(slots=True, kw_only=True)
class Request:
    """One request: the caller's id for it, whose it is (None: nobody's in particular) and its jobs by id."""

    request_id: str
    answer_id: str
    tenant: str | None
    jobs: dict[str, Explained] = field(default_factory=dict)


class Decisions:
    """A ring of `capacity` requests. All calls are for one event loop and take microseconds."""

    def __init__(self, clock: Clock, capacity: int = MAX_REQUESTS) -> None:
        self._clock = clock
        self._capacity = capacity
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self._by_caller: dict[str, str] = {}
        self._request_of: dict[str, Request] = {}

    def began(self, job_id: str, *, answer_id: str, request_id: str, tenant: str | None, trace: Trace) -> None:
        """A job of the request that its caller knows as `request_id` and whose answer is `answer_id`; `trace` is filled in meanwhile."""
        request = self._requests.get(answer_id)
        if request is None:
            request = self._requests[answer_id] = Request(request_id=request_id, answer_id=answer_id, tenant=tenant)
            self._by_caller[request_id] = answer_id
            if len(self._requests) > self._capacity:
                self._forget(self._requests.popitem(last=False)[1])
        request.jobs[job_id] = Explained(job_id=job_id, arrived_ns=trace.arrived_ns, trace=trace)
        self._request_of[job_id] = request

    def note(self, job_id: str, role: str, ask: Ask, ranking: Ranking, chosen: WorkerRef | None) -> None:
        """A choice was made for `job_id`; nothing happens when that job has left the ring."""
        request = self._request_of.get(job_id)
        if request is None:
            return
        job = request.jobs[job_id]
        if len(job.notes) >= MAX_NOTES:
            job.dropped += 1
        else:
            kept, left_out = _bounded(ranking, chosen)
            job.notes.append(
                Note(at_ns=self._clock.now_ns(), role=role, ask=ask._replace(pending=()), ranking=kept, chosen=chosen, left_out=left_out)
            )

    def ended(self, job_id: str, trace: Trace) -> None:
        """`job_id` is over, however it ended."""
        request = self._request_of.get(job_id)
        if request is not None:
            request.jobs[job_id].trace, request.jobs[job_id].outcome = None, happened(trace)

    def find(self, id: str) -> Request | None:
        """The request known as `id`, to its caller or by its answer; None when it was never here or has left."""
        return self._requests.get(id) or self._requests.get(self._by_caller.get(id, ""))

    def _forget(self, request: Request) -> None:
        if self._by_caller.get(request.request_id) == request.answer_id:
            del self._by_caller[request.request_id]
        for job_id in request.jobs:
            del self._request_of[job_id]


def _bounded(ranking: Ranking, chosen: WorkerRef | None) -> tuple[Ranking, int]:
    """The best of `ranking`, with `chosen`, and how many that leaves out."""
    if len(ranking.scored) <= MAX_CANDIDATES:
        return ranking, 0
    best, rest = ranking.scored[:MAX_CANDIDATES], ranking.scored[MAX_CANDIDATES:]
    kept = (*best, *(scored for scored in rest if scored.worker == chosen))
    return ranking._replace(scored=kept), len(ranking.scored) - len(kept)


def happened(trace: Trace) -> dict[str, Any]:
    """What a request has come to so far, without its tokens."""
    reason = None if trace.reason is None else str(trace.reason)
    return {"generated": len(trace.generated), "finish_reason": reason, **extension_of(trace, token_ids=False)}
