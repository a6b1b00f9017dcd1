"""What a request goes through before a worker hears of it, in this order.

1. *Look*: what of its prompt does the pool hold?
2. *Forecast*: a request that would miss the targets is refused now (`slo.py`).
3. *Follow*: what another request computes already is waited for (`shared.py`); else it leads, if there is enough to compute.
4. *Short cut*: short prompts, and those held but for a little, need no prefill worker; nor do those that would wait longer for one.
5. *Line*: wait for room and one's turn (`gate.py`), while the blocks are fetched and held (`prefetch.py`). Whose attempt failed stands in
   line again, in front, with the priority and the deadline it had.

`Entry` is one request's part in it; whatever happens to the request, leaving the `with` block gives everything back.
"""

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Self

from kvpool.clock import Clock
from kvpool.policy.admission.fairness import PROMPT, TokenCounters, user_of
from kvpool.policy.routing import Pending
from router.attempts import Attempts
from router.choose import Chooser
from router.fleet import Fleet
from router.holdings import Holdings
from router.job import Trace
from router.need import Need
from router.queue.gate import DIRECT, PREFILL, Gate, Passage
from router.queue.prefetch import Prefetcher
from router.queue.refusal import RefusedError
from router.queue.shared import Led, SharedWork
from router.queue.slo import Arrival, Forecast
from router.queue.warm import Warmer
from router.settings import Limits
from router.worker import Worker

_NO_BOUND = 1 << 30
_LOADED = 0.1
"""What a token of prompt that is only loaded costs its tenant, in tokens that are computed."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Since the start: requests that needed no prefill worker though there was one, and refusals by reason."""

    direct: int = 0
    refused: Counter[str] = field(default_factory=Counter)


class Entrance:
    """The entrance of one router."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        holdings: Holdings,
        chooser: Chooser,
        prefetcher: Prefetcher,
        forecast: Forecast,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self.fleet = fleet
        self.holdings = holdings
        self.chooser = chooser
        self.prefetcher = prefetcher
        self.forecast = forecast
        self.clock = clock
        self.limits = limits
        self.counters, self.users = TokenCounters(), TokenCounters()
        self.gate = Gate(self._room, limits.max_queued, clock, self.counters, self.users)
        self.shared = SharedWork(clock, least_tokens=limits.follow_tokens, timeout_s=limits.follow_timeout_s)
        self.warmer = Warmer(prefetcher)
        self.counts = Counts()
        fleet.on_room = self.gate.poke
        fleet.on_joined = self.warmer.joined

    def entry(self, need: Need, trace: Trace, attempts: Attempts) -> "Entry":
        """For one request."""
        return Entry(self, need, trace, attempts)

    async def close(self) -> None:
        """Let go of what is held; bounded."""
        await self.gate.close()
        await self.warmer.close()
        await self.prefetcher.close()

    def _room(self, kind: str, on_way: dict[str, int]) -> int:
        """Requests of `kind` that may pass now. Where no worker is there is no bound: who passes waits for one to join."""
        decode = self.fleet.room("decode")
        room = _NO_BOUND if decode is None else decode - sum(on_way.values())
        if kind == PREFILL:
            prefill = self.fleet.room("prefill")
            room = min(room, _NO_BOUND if prefill is None else prefill - on_way[PREFILL])
        return room


class Entry:
    """One request's part. A context manager."""

    def __init__(self, owner: Entrance, need: Need, trace: Trace, attempts: Attempts) -> None:
        self._owner = owner
        self._need = need
        self._trace = trace
        self._attempts = attempts
        self._tenant = need.job.scope.tenant or need.job.user
        self._user = need.job.user if need.job.scope.tenant else ""
        self._held = ExitStack()
        self._led: Led | None = None
        self._passage = Passage(owner.gate, owner.clock)
        self._retries = 0
        self._alone = False
        self.direct = False
        """Whether it goes to a decode worker at once."""

    def __enter__(self) -> Self:
        self._over = self._owner.chooser.began(self._tenant)
        return self

    def __exit__(self, *exc: object) -> None:
        self._over(len(self._trace.generated))
        self._owner.forecast.ended(self._need.job.request_id)
        self._passage.arrived()
        self._held.close()
        self._land(0)

    async def enter(self) -> None:
        """Go through it. Raises `RefusedError`, or `UnavailableError` when the deadline passes in line."""
        try:
            await self._enter()
        except RefusedError as error:
            self._owner.counts.refused[error.reason] += 1
            raise

    async def again(self) -> None:
        """Stand in line once more if an attempt has failed since the last time. Raises `UnavailableError` when the deadline passes."""
        if self._trace.retries == self._retries:
            return
        self._retries = self._trace.retries
        job = self._need.job
        prefill = not self.direct and not self._trace.generated and bool(self._attempts.usable("prefill"))
        kind = PREFILL if prefill else DIRECT
        await self._passage.enter(
            kind, tenant=self._tenant, user=self._user, priority=job.priority, cost=0.0, deadline_ns=job.deadline_ns, again=True
        )
        self._trace.queued_ns = self._passage.waited_ns

    def stepped_aside(self) -> None:
        """It waits for a worker that isn't there yet: the room there is is for others meanwhile."""
        self._passage.arrived()

    def arrived(self, worker: Worker, expected_s: float) -> None:
        """`worker` counts the request, and is expected to need so long for its prompt (0: unknown)."""
        self._passage.arrived()
        if self._led is not None:
            self._owner.shared.begun(self._led, worker.ref, expected_s)

    def loaded(self) -> None:
        """A worker has all it needs of the pool."""
        self._held.close()

    def landed(self, worker: Worker, blocks: int) -> None:
        """The pool holds so many leading blocks of the prompt, for all that share the worker's namespace."""
        self._need.hold(worker, blocks)
        self._land(blocks)

    def decoding(self, worker: Worker) -> None:
        """A decode worker has the whole prompt, and has pushed what it computed."""
        self.landed(worker, len(self._need.keys(worker)))
        self._owner.forecast.decoding(self._need.job.request_id, self._tokens)

    def spent(self, service: float) -> None:
        """So much service has gone to the request's tenant, and to who of its users it is of."""
        self._owner.counters.charge(self._tenant, service)
        self._owner.users.charge(user_of(self._tenant, self._user), service)

    @property
    def _tokens(self) -> int:
        """Of prompt and expected answer."""
        job = self._need.job
        return len(job.prompt) + self._owner.chooser.answer_tokens(job.max_tokens)

    async def _enter(self) -> None:
        owner, job = self._owner, self._need.job
        worker = next(iter(self._attempts.usable("decode") or self._attempts.usable("prefill")), None)
        if worker is None:
            return
        self._alone = self._need.alone(worker)
        held = await owner.holdings.look(self._need, worker)
        owner.warmer.wanted(worker, self._need.keys(worker)[:held])
        self._admit(self._missing(worker, held), self._pending(worker, held))
        if not self._short(worker, held):
            held, self._led, self._trace.followed = await owner.shared.join(
                job.request_id,
                self._need.keys(worker),
                held,
                block_tokens=worker.block_tokens,
                priority=job.priority,
                deadline_ns=job.deadline_ns,
                waits=self._waits,
            )
            self._need.hold(worker, held)
        prefills = bool(self._attempts.usable("prefill"))
        self.direct = not prefills or self._short(worker, held) or self._helped(worker, held)
        if not prefills:
            self._trace.fell_back("no_prefill_worker")
        elif self.direct:
            self._trace.direct = True
            owner.counts.direct += 1
        await self._stand_in_line(worker, held)

    def _waits(self, pending: Pending) -> bool:
        """Whether to wait for what another request is having computed."""
        role = "prefill" if self._attempts.usable("prefill") else "decode"
        return self._owner.chooser.waits(role, self._need, self._attempts.usable(role), pending)

    def _missing(self, worker: Worker, held: int) -> int:
        """Prompt tokens that are neither in the pool nor in some decode worker."""
        resident = self._owner.holdings.most_resident(self._need, worker, self._attempts.usable("decode"))
        return max(0, len(self._need.job.prompt) - max(held, resident) * worker.block_tokens)

    def _short(self, worker: Worker, held: int) -> bool:
        """Whether so little is to be computed that a prefill worker isn't worth the way, or a prefill elsewhere would be for nothing."""
        return self._is_short(self._missing(worker, held))

    def _helped(self, worker: Worker, held: int) -> bool:
        """Whether a decode worker prefills it, since that is quicker than to wait for a prefill worker."""
        limits = self._owner.limits
        if limits.direct_tokens == 0 or self._missing(worker, held) > limits.help_tokens:
            return False
        return self._owner.chooser.helped(self._need, self._attempts.usable("prefill"), self._attempts.usable("decode"))

    def _is_short(self, missing: int) -> bool:
        return self._alone or missing <= self._owner.limits.direct_tokens > 0

    def _pending(self, worker: Worker, held: int) -> Pending | None:
        return self._owner.shared.pending(self._need.keys(worker), held, block_tokens=worker.block_tokens, priority=self._need.job.priority)

    def _admit(self, missing: int, pending: Pending | None) -> None:
        """Refuse who would miss a target; `pending`: what it might wait for."""
        owner, job = self._owner, self._need.job
        if not owner.forecast.any:
            return
        direct = self._is_short(missing) or not self._attempts.usable("prefill")
        role, kind = ("decode", DIRECT) if direct else ("prefill", PREFILL)
        first, decode = owner.chooser.learnt(role), owner.chooser.learnt("decode")
        workers, decoders = self._attempts.usable(role), self._attempts.usable("decode")
        best = owner.chooser.peek(role, self._need, workers, pending)
        if first is None or decode is None or best is None:
            return
        arrival = Arrival(
            request_id=job.request_id,
            tokens=self._tokens,
            best=best.scored,
            before_tokens=owner.gate.cost_before(kind, job.priority),
            workers=len(workers),
        )
        room = [worker.said.kv_tokens for worker in decoders]
        owner.forecast.admit(
            arrival, first.estimate, decode.estimate, decode_workers=len(decoders), kv_tokens=sum(room) if all(room) else 0
        )

    async def _stand_in_line(self, worker: Worker, held: int) -> None:
        owner, job = self._owner, self._need.job
        kind = DIRECT if self.direct else PREFILL
        missing = self._missing(worker, held)
        if not owner.gate.open_for(kind):
            role = "decode" if self.direct else "prefill"
            best = owner.chooser.peek(role, self._need, self._attempts.usable(role))
            if best is not None:
                first = best.scored.candidate.resident_tokens // worker.block_tokens
                keys = self._need.keys(worker)[:held]
                self._held.enter_context(owner.prefetcher.hold(keys, first, block_tokens=worker.block_tokens, host=best.worker.host))
        cost = PROMPT * (missing + _LOADED * (len(job.prompt) - missing))
        await self._passage.enter(kind, tenant=self._tenant, user=self._user, priority=job.priority, cost=cost, deadline_ns=job.deadline_ns)
        self._trace.queued_ns = self._passage.waited_ns

    def _land(self, blocks: int) -> None:
        if self._led is not None:
            self._owner.shared.end(self._led, blocks)
            self._led = None
