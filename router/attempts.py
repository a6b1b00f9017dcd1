"""One job's attempts: who failed it, how often, and who of them answers again."""

import asyncio
import logging
from collections.abc import Sequence

from kvpool.clock import Clock
from kvpool.errors import ConfigError, DeadlineError, KvpoolError, UnavailableError
from kvpool.policy.routing import WorkerRef
from kvpool.units import SECOND
from router.fleet import Fleet
from router.job import Job, Trace
from router.settings import Limits
from router.watch import Watch
from router.worker import Worker

log = logging.getLogger("router.attempts")


class Attempts:
    """Of one job."""

    def __init__(self, fleet: Fleet, clock: Clock, limits: Limits, job: Job, trace: Trace) -> None:
        self._fleet = fleet
        self._clock = clock
        self._limits = limits
        self._job = job
        self._trace = trace
        self._excluded: set[WorkerRef] = set()
        self._count = 0

    @property
    def over(self) -> bool:
        """Whether the job's deadline has passed."""
        return self._clock.now_ns() >= self._job.deadline_ns

    def new_id(self, phase: str) -> str:
        """Every attempt has its own id: an old one may still run on a worker that was only stopped."""
        self._count += 1
        return f"{self._job.request_id}.{phase}{self._count}"

    def left_s(self) -> float:
        """Seconds to the deadline; never zero, so that a late call fails by its time limit."""
        return max(0.001, (self._job.deadline_ns - self._clock.now_ns()) / SECOND)

    def usable(self, role: str) -> list[Worker]:
        """Workers of `role` that take requests, have the adapter of this one, and haven't failed it."""
        adapter = self._job.adapter
        return [w for w in self._fleet.offered(role) if w.ref not in self._excluded and (not adapter or adapter in w.adapters)]

    def failed(self, worker: Worker, error: KvpoolError) -> None:
        """Note a failed attempt; raises when it was the last the request may make, or when the request itself is at fault."""
        if isinstance(error, ConfigError):
            raise error
        if self.over:
            raise DeadlineError(f"the request's deadline passed; last: {error}") from error
        log.warning("%s: %s failed after %d tokens: %s", self._job.request_id, worker.name, len(self._trace.generated), error)
        self._fleet.suspect(worker)
        self._excluded.add(worker.ref)
        self._trace.retries += 1
        if self._trace.retries >= self._limits.max_failures:
            raise UnavailableError(f"given up after {self._trace.retries} failed attempts; last: {error}") from error

    async def readmit(self, role: str) -> None:
        """Take back excluded workers that answer again."""
        excluded = [worker for worker in self._fleet.offered(role) if worker.ref in self._excluded]
        loads: Sequence[int | None] = await asyncio.gather(*(self.load_of(worker) for worker in excluded))
        self._excluded -= {worker.ref for worker, load in zip(excluded, loads, strict=True) if load is not None}

    def watch(self, worker: Worker) -> Watch:
        """How to judge the worker's silence."""
        return Watch(
            name=worker.name,
            clock=self._clock,
            stall_timeout_s=self._limits.stall_timeout_s,
            deadline_ns=self._job.deadline_ns,
            present=lambda: worker.listed,
            load=lambda: self.load_of(worker),
        )

    async def load_of(self, worker: Worker) -> int | None:
        """How many requests `worker` says it is busy with; None when it doesn't say."""
        limit_s = min(self._limits.status_timeout_s, self.left_s())
        try:
            with self._fleet.hold(worker):
                async with asyncio.timeout(limit_s):
                    status = await worker.port.status(limit_s)
        except (KvpoolError, TimeoutError):
            return None
        return status.active_requests + status.queued_requests
