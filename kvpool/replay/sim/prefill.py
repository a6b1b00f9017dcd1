"""One prefill node: jobs whose KV has come, computed chunk by chunk in the order that its engine keeps.

* arrival: one after the other, as they were sent; who is still loading keeps the others waiting, or a long one would slip in;
* shortest: the chunk of the job that has the least left, but for age, by the function that our engine's scheduler has
  (`kvpool.policy.order`). What is left of a job changes only while it runs, so the order of the others is fixed.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvpool.policy.order import place
from kvpool.policy.routing import Ask, Load, Scored, WorkerOrder
from kvpool.replay.sim.request import Fate
from kvpool.replay.sim.world import World


@dataclass(slots=True, eq=False)
class Job:
    """One request on its prefill node. `done` tokens of the prompt have KV there; loads and times as they came about."""

    fate: Fate
    ask: Ask
    scored: Scored
    routed_s: float
    done: int = 0
    context: int = -1
    """Tokens that it began with; -1: it hasn't begun."""
    began_s: float = 0.0
    compute_s: float = 0.0
    setup_s: float = 0.0
    """To load its adapter, before its first chunk."""
    waits: bool = False
    place: int = 0
    """In the order in which all jobs were sent."""
    before: int = 0
    """Tokens that its node had computed when it was sent there."""
    loads: list[Load] = field(default_factory=list)

    @property
    def prompt(self) -> int:
        """Its tokens."""
        return self.fate.request.prompt_tokens


class PrefillNode:
    """The jobs that are ready here. `busy_s` is all the time it has computed."""

    def __init__(self, world: World, order: WorkerOrder) -> None:
        self._world = world
        self._order = order
        self._ready: list[tuple[float, int, Job]] = []
        self._sent: deque[Job] = deque()
        self._serial = self._places = self._computed = 0
        self.running: Job | None = None
        self.busy_s = 0.0

    def expect(self, job: Job) -> None:
        """`job` has been sent here; `add` follows when its KV has come."""
        self._places += 1
        job.place, job.before = self._places, self._computed
        self._sent.append(job)

    def add(self, job: Job) -> None:
        """`job` has its KV and may run. Its context need not be final yet."""
        self._serial += 1
        heappush(self._ready, (self._rank(job), self._serial, job))

    def next(self) -> Job | None:
        """The job whose chunk is next, taken out; None while one runs or none is ready."""
        if self.running is not None:
            return None
        self.running = self.take()
        return self.running

    def take(self) -> Job | None:
        """The first of those that are ready, taken out: it computes with others, or comes back by `add`."""
        if not self._ready or (self._order is WorkerOrder.ARRIVAL and self._ready[0][2] is not self._sent[0]):
            return None
        return heappop(self._ready)[2]

    def chunk(self, job: Job) -> tuple[int, float]:
        """How many tokens `job` computes now, and the seconds that takes."""
        left = job.prompt - job.done
        tokens = left if self._order is WorkerOrder.ARRIVAL else min(left, self._world.chunk(job.done))
        seconds = self._world.prefill_s(tokens, job.done)
        if job.done == job.context:
            return tokens, max(seconds, self.context_s(job)) + job.setup_s  # layer by layer, both at once
        return tokens, seconds

    def context_s(self, job: Job) -> float:
        """Seconds to bring what `job` began with from the host's memory to the GPUs."""
        return job.context * self._world.token_bytes / self._world.host_to_device

    def ran(self, job: Job, tokens: int, seconds: float) -> bool:
        """A chunk of `job`, which was taken out, is through; True when it was its last."""
        self.running = None
        self.busy_s += seconds
        job.done += tokens
        self._computed += tokens
        if job.done == job.prompt:
            self._sent.remove(job)
            return True
        self.add(job)
        return False

    def _rank(self, job: Job) -> float:
        if self._order is WorkerOrder.ARRIVAL:
            return job.place
        return place(job.prompt - job.done, job.before)
