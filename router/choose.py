"""Which worker: the policy's ranking over what is known of each, within a bound on how uneven the load may get.

The policy (`kvpool.policy.routing`, by name) ranks; each role has its own, for what it learns. Three things come after it:

* *Bounded load* (Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018): a worker that has no room, or more
  than `FEW` requests and `UNEVEN` times the mean, is passed over while another isn't. However much a policy likes the one holder of a hot
  prefix, it doesn't get everything.
* *Help*: a request that would wait for a prefill worker may be prefilled by a decode worker, where our policy expects that to be quicker.
* *Keeping a plan*: the decode worker that was planned when the prefill was sent stays, unless it failed or has `KEEP_ACTIVE` requests more
  than the best. The blocks are on their way to it.

Every choice is noted with all its terms (`router/decisions`), and what then happened teaches the policy its rates.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvpool.clock import Clock
from kvpool.policy.routing import Ask, Candidate, LeastTtft, Load, Observed, Pending, Policy, Ranking, Scored, WorkerRef
from kvpool.policy.routing.learning import Learning
from kvpool.request import StageTimes, TokenSources
from router.decisions import Decisions
from router.fleet import Fleet
from router.holdings import Holdings, Seen
from router.need import Need
from router.worker import Worker

log = logging.getLogger("router.choose")

UNEVEN = 1.25
FEW = 8
KEEP_ACTIVE = 2
_A_PREFILL = 16
"""What a decode worker computes of fewer tokens takes as long as the answers beside them, and says nothing about a prefill."""
_ANSWER_TOKENS = 128.0
_ANSWER_MEMORY = 64


class Chosen(NamedTuple):
    """A worker, and why."""

    worker: Worker
    scored: Scored
    ask: Ask


class Chooser:
    """The choices of one router."""

    def __init__(self, *, fleet: Fleet, holdings: Holdings, policies: Mapping[str, Policy], decisions: Decisions, clock: Clock) -> None:
        """`policies`: one for each role."""
        self._fleet = fleet
        self._holdings = holdings
        self._policies = policies
        self._decisions = decisions
        self._clock = clock
        self._in_work: Counter[str] = Counter()
        self._answer_tokens = _ANSWER_TOKENS
        self.policy = next(iter(policies.values())).name
        """What the policies are called."""
        self.chosen: Counter[tuple[str, str]] = Counter()
        """Choices by role and by what decided: `policy`, `bound` or `plan`."""

    def best(self, role: str, need: Need, workers: Sequence[Worker], attempt_id: str, keep: WorkerRef | None = None) -> Chosen | None:
        """The best of `workers`, all of `role`; None when there is none. `keep` is who was planned for."""
        ask = self._ask(need, attempt_id)
        ranking = self._rank(role, need, workers, ask)
        if ranking is None:
            return None
        by_ref = {worker.ref: worker for worker in workers}
        scored, why = self._settle(ranking, by_ref, keep)
        self.chosen[role, why] += 1
        self._decisions.note(need.job.request_id, role, ask, ranking, scored.worker)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s: %s for %d tokens by %s: %s", attempt_id, role, ask.prompt_tokens, why, ranking.explain())
        return Chosen(by_ref[scored.worker], scored, ask)

    def peek(self, role: str, need: Need, workers: Sequence[Worker], pending: Pending | None = None) -> Chosen | None:
        """Who would be the best now, if `pending` may be waited for; nobody is told."""
        ask = self._ask(need, need.job.request_id, pending)
        ranking = self._rank(role, need, workers, ask)
        return None if ranking is None else Chosen(next(w for w in workers if w.ref == ranking.best.worker), ranking.best, ask)

    def waits(self, role: str, need: Need, workers: Sequence[Worker], pending: Pending) -> bool:
        """Whether the request should wait for `pending`; always by a policy that knows of no such thing."""
        policy = self._policies[role]
        if not isinstance(policy, LeastTtft) or not workers:
            return True
        moment: dict[int, Seen] = {}
        candidates = [self._candidate(need, worker, moment) for worker in workers]
        return policy.waits(self._ask(need, need.job.request_id, pending), candidates, self._clock.now_ns())

    def helped(self, need: Need, workers: Sequence[Worker], helpers: Sequence[Worker]) -> bool:
        """Whether a decode worker of `helpers` would have the first token before any of `workers`, which prefill. Nobody is told."""
        policy = self._policies["prefill"]
        if not isinstance(policy, LeastTtft) or self._policies["decode"] is not policy:
            return False
        moment: dict[int, Seen] = {}
        able = [self._candidate(need, worker, moment) for worker in helpers if self._fleet.room_of(worker) > 0]
        ranking = policy.rank_with_help(
            self._ask(need, need.job.request_id), [self._candidate(need, w, moment) for w in workers], able, self._clock.now_ns()
        )
        return ranking is not None and ranking.best.worker.role == "decode"

    def routed(self, chosen: Chosen) -> None:
        """The request has been sent there."""
        self._policies[chosen.worker.ref.role].routed(chosen.ask, chosen.scored, self._clock.now_ns())

    def answered(self, chosen: Chosen, sources: TokenSources, times: StageTimes) -> None:
        """Its first event says how it came about. What can't be true teaches nothing."""
        candidate, prompt = chosen.scored.candidate, chosen.ask.prompt_tokens
        if sources.cached or sources.computed:  # an engine that says neither has proved nothing
            self._holdings.proved(chosen.worker, candidate.resident_tokens, sources.resident)
        loads: tuple[Load, ...] = ()
        if candidate.pool and sources.pool and len({source[:2] for source in candidate.pool}) == 1:
            loads = (Load(candidate.pool[0].tier, candidate.pool[0].near, sources.pool, times.load_ns),)
        computed = sources.computed if sources.cached + sources.computed >= prompt else 0
        if chosen.worker.ref.role == "decode" and computed < _A_PREFILL:
            computed = 0
        observed = Observed(
            queue_ns=times.queue_ns,
            loads=loads,
            context_tokens=max(0, prompt - computed),
            computed_tokens=computed,
            compute_ns=times.compute_ns,
        )
        self._policies[chosen.worker.ref.role].first_token(chosen.ask.request_id, chosen.worker.ref, observed, self._clock.now_ns())

    def stepped(self, worker: Worker, step_ns: int) -> None:
        """Two tokens of one answer were so far apart."""
        policy = self._policies[worker.ref.role]
        if isinstance(policy, Learning):
            policy.estimate.stepped(worker.decode_tokens, step_ns)

    def ended(self, chosen: Chosen) -> None:
        """The request is over there, however it went."""
        self._policies[chosen.worker.ref.role].ended(chosen.ask.request_id, chosen.worker.ref, self._clock.now_ns())

    def forget(self, worker: WorkerRef) -> None:
        """That incarnation is gone."""
        self._holdings.index.forget(worker)
        self._policies[worker.role].forget(worker)

    def expected_s(self, chosen: Chosen) -> float:
        """How long the worker is expected to need for the prompt; 0 by a policy that doesn't know."""
        if self.learnt(chosen.worker.ref.role) is None:
            return 0.0
        return sum(value for name, value in chosen.scored.terms if name in ("queue", "load", "compute"))

    def learnt(self, role: str) -> Learning | None:
        """The rates that the role's policy has learnt; None when it is of those that learn nothing."""
        policy = self._policies[role]
        return policy if isinstance(policy, Learning) else None

    def began(self, tenant: str) -> Callable[[int], None]:
        """A request of `tenant` is in work, until the function it returns is called with the length of its answer."""
        self._in_work[tenant] += 1

        def over(answer_tokens: int) -> None:
            self._in_work[tenant] -= 1
            if not self._in_work[tenant]:
                del self._in_work[tenant]
            self._answer_tokens += (answer_tokens - self._answer_tokens) / _ANSWER_MEMORY if answer_tokens else 0.0

        return over

    def answer_tokens(self, max_tokens: int) -> int:
        """How long an answer of at most `max_tokens` is expected to be."""
        return max(1, min(max_tokens, round(self._answer_tokens)))

    def _rank(self, role: str, need: Need, workers: Sequence[Worker], ask: Ask) -> Ranking | None:
        moment: dict[int, Seen] = {}
        candidates = [self._candidate(need, worker, moment) for worker in workers]
        return self._policies[role].rank(ask, candidates, self._clock.now_ns()) if candidates else None

    def _ask(self, need: Need, attempt_id: str, pending: Pending | None = None) -> Ask:
        job = need.job
        tenant = job.scope.tenant or job.user
        total = self._in_work.total()
        return Ask(
            request_id=attempt_id,
            prompt_tokens=len(job.prompt),
            output_tokens=self.answer_tokens(job.max_tokens),
            session=job.session,
            tenant=tenant,
            adapter=job.adapter,
            priority=min(100, max(0, 50 - job.priority)),
            arrived_ns=self._clock.now_ns(),
            deadline_ns=job.deadline_ns,
            tenant_share=self._in_work[tenant] * len(self._in_work) / total if total else 0.0,
            pending=(pending,) if pending is not None else (),
        )

    def _candidate(self, need: Need, worker: Worker, moment: dict[int, Seen]) -> Candidate:
        keys = need.keys(worker)
        seen = moment.get(id(keys))
        if seen is None:
            seen = moment[id(keys)] = self._holdings.see(need, worker)
        resident = self._holdings.resident(need, worker, seen)
        elsewhere, here, pool = worker.elsewhere, self._holdings.pressure(worker.ref), seen.pressure
        learnt = self.learnt(worker.ref.role)
        token_s = 0.0 if learnt is None else learnt.estimate.token_s(worker.ref)
        return Candidate(
            worker=worker.ref,
            resident_tokens=resident,
            pool=self._holdings.sources(need, worker, seen, resident),
            active=worker.load,
            queued=worker.queued + elsewhere.queued,
            backlog_tokens=worker.backlog_tokens + elsewhere.backlog_tokens,
            decode_tokens=worker.decode_tokens + elsewhere.decode_tokens,
            decode_capacity=worker.said.kv_tokens,
            free_tokens=here.free,
            price_s=here.price * token_s,
            pool_free_tokens=pool.free // worker.said.token_bytes if worker.said.token_bytes else 0,
            pool_price_s=pool.price * token_s,
            adapter_loaded=not need.job.adapter or need.job.adapter in worker.adapters,
            suspect=self._fleet.suspected(worker),
        )

    def _settle(self, ranking: Ranking, workers: Mapping[WorkerRef, Worker], keep: WorkerRef | None) -> tuple[Scored, str]:
        """Who of the ranking it is to be, and what decided."""
        good = [scored for scored in ranking.scored if scored.candidate.suspect == ranking.best.candidate.suspect]
        mean = sum(scored.candidate.active for scored in good) / len(good)
        roomy = [scored for scored in good if self._fleet.room_of(workers[scored.worker]) > 0]
        within = [scored for scored in roomy if scored.candidate.active < max(FEW, UNEVEN * (mean + 1))]
        first = (within or roomy or good)[0]
        kept = next((scored for scored in good if scored.worker == keep), None)
        if kept is not None and kept.candidate.active <= first.candidate.active + KEEP_ACTIVE:
            return kept, "plan"
        return first, "policy" if first is ranking.best else "bound"
