"""A cluster in virtual time: requests arrive, are routed by a production policy, prefilled, handed over and decoded.

Events are (time, number, what to do), in order; equal times in the order in which they were asked for, so equal inputs give equal runs.

1. *Arrival*: the index says who holds what; candidates are made of that and of how busy nodes are; the policy ranks them; admission may
   say no.
2. What the plan fetches from other nodes is sent at once, while the request waits. It is ready when the last part has come.
3. When its turn comes the node looks again what there is by then, as engines do: a puller loads what has become available meanwhile.
4. Chunks are computed; with the last one the first token is there, blocks are stored, and the policy is told how it went.
5. The KV goes to the decode node with the least KV in use, unless admission finds decode too full: then the prefill was wasted.

A request that waits for another's computation (single flight) does so until that is done, at most twice as long as was expected.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from kvpool.policy.admission.early import EarlyRejection
from kvpool.policy.admission.single import Flight, Flights
from kvpool.policy.routing import Ask, Candidate, LeastTtft, Load, Observed, Pending, Ranking, Source, Tier, WorkerRef
from kvpool.policy.routing.learning import Learning
from kvpool.replay.sim.decode import DecodeNode
from kvpool.replay.sim.links import Links
from kvpool.replay.sim.prefill import Job, PrefillNode
from kvpool.replay.sim.request import Fate, SimRequest
from kvpool.replay.sim.store import Found, Store
from kvpool.replay.sim.systems import System
from kvpool.replay.sim.world import World
from kvpool.units import SECOND

_PATIENCE = 2.0
_PRICED_EVERY = 64


class Cluster:
    """One run of one system. Not to be used twice."""

    def __init__(self, world: World, system: System, admission: EarlyRejection | None = None) -> None:
        self._world = world
        self._system = system
        self._admission = admission
        self._store = Store(world, system.eviction, placed=system.placed)
        self._links = Links(world.nodes, world.network)
        self.prefill = [PrefillNode(world, system.order) for _ in range(world.prefill_nodes)]
        self.decode = [DecodeNode(world, system.order) for _ in range(world.decode_nodes)]
        roles = ["prefill"] * world.prefill_nodes + ["decode"] * world.decode_nodes
        self._workers = [WorkerRef(role, f"{node:02d}", 1) for node, role in enumerate(roles)]
        self._active = [0] * world.nodes
        self._backlog = [0] * world.nodes
        self._prompts = [0] * world.nodes
        self._adapters: list[set[str]] = [set() for _ in range(world.nodes)]
        self._flights = Flights()
        self._leads: dict[str, tuple[Flight, int, int]] = {}  # request: (flight, node, when its first token is expected)
        self._following: dict[int, list[Job]] = {}  # by id of the flight
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._serial = 0
        self._bare: list[Candidate] = []
        self._arrived = 0
        self.now = 0.0
        self.loads: list[tuple[float, float]] = []
        """(time, decode load), at each first token, where there is admission."""

    def run(self, requests: Sequence[SimRequest]) -> list[Fate]:
        """What became of each, in the same order."""
        fates = [Fate(request) for request in requests]
        for fate in fates:
            self._at(fate.request.arrived_s, lambda now, fate=fate: self._arrive(fate, now))  # type: ignore[misc]
        events = self._events
        while events:
            self.now, _, happen = heappop(events)
            happen(self.now)
        return fates

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        self._serial += 1
        heappush(self._events, (when, self._serial, happen))

    # Routing

    def _arrive(self, fate: Fate, now: float) -> None:
        request = fate.request
        found = self._store.find(request.keys)
        ask = self._ask(request, found, now)
        if self._arrived % _PRICED_EVERY == 0:
            self._bare = [self._priced(node) for node in range(self._world.nodes)]
        self._arrived += 1
        prefill = self._world.prefill_nodes
        missing = request.prompt_tokens - found.anywhere * self._world.block_tokens
        helped = 0 < missing <= self._system.help_tokens
        ranking = self._rank(
            ask, [self._candidate(node, request, found, now) for node in range(self._world.nodes if helped else prefill)], now
        )
        assert ranking is not None
        scored = ranking.best
        node = int(scored.worker.id)
        ready_ns = _ns(now) + int(
            SECOND * sum(value for name, value in scored.terms if name in ("queue", "load", "transfer", "compute", "prefill"))
        )
        if self._admission is not None:
            size = request.prompt_tokens + request.output_tokens
            if not self._admission.ask(size, ready_ns, _ns(now)).accepted:
                fate.rejected_s = now
                return
            self._admission.coming(request.request_id, size, ready_ns)
        self._system.policy.routed(ask, scored, _ns(now))
        self._send(Job(fate, ask, scored, now), node, found, ready_ns, now)

    def _rank(self, ask: Ask, candidates: list[Candidate], now: float) -> Ranking | None:
        prefill, policy = self._world.prefill_nodes, self._system.policy
        if isinstance(policy, LeastTtft):
            return policy.rank_with_help(ask, candidates[:prefill], candidates[prefill:], _ns(now))
        return policy.rank(ask, candidates, _ns(now))

    def _ask(self, request: SimRequest, found: Found, now: float) -> Ask:
        pending: tuple[Pending, ...] = ()
        if self._system.single_flight:
            flight = self._flights.find(request.keys, found.anywhere, priority=0)
            if flight is not None:
                _, node, ready_ns = self._leads[flight[0].leader]
                tokens = (found.anywhere + flight[1]) * self._world.block_tokens
                pending = (Pending(self._workers[node], min(tokens, request.prompt_tokens - 1), max(ready_ns, _ns(now))),)
        return Ask(
            request_id=request.request_id,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            session=request.session,
            tenant=request.tenant,
            adapter=request.adapter,
            arrived_ns=_ns(now),
            pending=pending,
        )

    def _priced(self, node: int) -> Candidate:
        """The worker on `node` with what memory costs, in itself or in the pool."""
        policy, worker, free = self._system.policy, self._workers[node], self._store.free_tokens(node)
        price_s = self._store.price(node) * policy.estimate.token_s() if isinstance(policy, Learning) else 0.0
        if self._system.placed:
            return Candidate(worker=worker, pool_free_tokens=free, pool_price_s=price_s)
        return Candidate(worker=worker, free_tokens=free, price_s=price_s)

    def _candidate(self, node: int, request: SimRequest, found: Found, now: float) -> Candidate:
        most, size = request.prompt_tokens - 1, self._world.block_tokens
        near = min(most, found.near[node] * size)
        pool = (Source(Tier.DRAM, True, near),) if near else ()
        if self._system.pulls and (far := min(most, found.anywhere * size) - near) > 0:
            pool = (*pool, Source(Tier.DRAM, False, far, self._links.backlog_s(node, now)))
        return self._bare[node]._replace(
            pool=pool,
            active=self._active[node],
            queued=self._active[node],
            backlog_tokens=self._backlog[node],
            decode_tokens=self._prompts[node],
            adapter_loaded=not request.adapter or request.adapter in self._adapters[node],
        )

    # Prefill

    def _send(self, job: Job, node: int, found: Found, ready_ns: int, now: float) -> None:
        request, scored = job.fate.request, job.scored
        job.fate.worker = node
        self._prefills(node).expect(job)
        self._active[node] += 1
        self._backlog[node] += scored.compute_tokens
        self._prompts[node] += request.prompt_tokens
        if self._system.single_flight:
            following = self._flights.find(request.keys, found.anywhere, priority=0)
            if scored.wait_ns and following is not None:
                job.waits = True
                self._following.setdefault(id(following[0]), []).append(job)
                self._at(now + _PATIENCE * scored.wait_ns / SECOND, lambda then: self._release(job, node, then))
                return
            flight = self._flights.lead(request.request_id, request.keys, found.anywhere)
            self._leads[request.request_id] = flight, node, ready_ns
        fetched = scored.fetch_tokens > scored.candidate.near_tokens
        self._load(job, node, found, found.anywhere if fetched else 0 if self._system.placed else found.near[node], now)

    def _release(self, job: Job, node: int, now: float) -> None:
        """What it waited for is there, or has taken too long."""
        if job.waits:
            job.waits = False
            found = self._store.find(job.fate.request.keys)
            self._load(job, node, found, found.anywhere, now)

    def _load(self, job: Job, node: int, found: Found, blocks: int, now: float) -> None:
        """Bring the leading `blocks` to `node`; then the job is ready."""
        request, size = job.fate.request, self._world.block_tokens
        parts = self._store.parts(request.keys, found, found.near[node] if not self._system.placed else 0, blocks, node)
        came = self._links.transfer(parts, node, now, read=True)
        tokens = int(sum(parts.values()) / self._world.token_bytes)
        if tokens:
            job.loads.append(Load(Tier.DRAM, False, tokens, _ns(came - now)))
        if self._system.pulls:
            job.done = max(job.done, min(request.prompt_tokens - 1, blocks * size))
        if came > now:
            self._at(came, lambda then: self._ready(job, node, then))
        else:
            self._ready(job, node, now)

    def _ready(self, job: Job, node: int, now: float) -> None:
        if node < self._world.prefill_nodes:
            self.prefill[node].add(job)
            self._next(node, now)
        elif self._begin(job, node, now):
            came = now + self._prefills(node).context_s(job) + job.setup_s  # before its first pass: that has others' answers in it
            self._at(came, lambda then: self._invite(job, node - self._world.prefill_nodes, then))

    def _invite(self, job: Job, number: int, now: float) -> None:
        self.decode[number].invite(job, now)
        self._go_on(number, now)

    def _prefills(self, node: int) -> PrefillNode:
        return self.prefill[node] if node < self._world.prefill_nodes else self.decode[node - self._world.prefill_nodes].guests

    def _next(self, node: int, now: float) -> None:
        """Begin the next chunk, if the node is idle and somebody is ready."""
        while (job := self.prefill[node].next()) is not None:
            if job.context < 0 and not self._begin(job, node, now):
                self.prefill[node].running = None
                continue
            tokens, seconds = self.prefill[node].chunk(job)
            self._at(now + seconds, lambda then, t=tokens, s=seconds: self._ran(node, t, s, then))  # type: ignore[misc]
            return

    def _begin(self, job: Job, node: int, now: float) -> bool:
        """Its turn has come: what is there by now counts. False when it goes off to load more."""
        request = job.fate.request
        found = self._store.find(request.keys)
        most = request.prompt_tokens - 1
        if self._system.pulls and min(most, found.anywhere * self._world.block_tokens) > job.done:
            before = job.done
            blocks = found.near[node] if not self._system.placed else 0
            if max(blocks, found.anywhere) * self._world.block_tokens > before:
                first = max(blocks, before // self._world.block_tokens)
                parts = self._store.parts(request.keys, found, first, found.anywhere, node)
                came = self._links.transfer(parts, node, now, read=True)
                job.done = min(most, found.anywhere * self._world.block_tokens)
                if came > now:
                    job.loads.append(Load(Tier.DRAM, False, int(sum(parts.values()) / self._world.token_bytes), _ns(came - now)))
                    self._at(came, lambda then: self._ready(job, node, then))
                    return False
        job.done = max(job.done, min(most, found.near[node] * self._world.block_tokens)) if not self._system.placed else job.done
        job.context = job.fate.hit_tokens = job.done
        job.began_s = now
        if request.adapter and request.adapter not in self._adapters[node]:
            self._adapters[node].add(request.adapter)
            job.setup_s = self._world.adapter_s
        return True

    def _ran(self, node: int, tokens: int, seconds: float, now: float) -> None:
        job = self.prefill[node].running
        assert job is not None
        job.compute_s += seconds - (job.setup_s if job.done == job.context else 0.0)
        if self.prefill[node].ran(job, tokens, seconds):
            self._prefilled(job, node, now)
        self._next(node, now)

    def _prefilled(self, job: Job, node: int, now: float) -> None:
        fate, request = job.fate, job.fate.request
        fate.first_token_s, fate.compute_s = now, job.compute_s
        self._active[node] -= 1
        self._backlog[node] -= job.scored.compute_tokens
        self._prompts[node] -= request.prompt_tokens
        seen = Observed(
            queue_ns=_ns(job.began_s - job.routed_s),
            loads=tuple(job.loads),
            context_tokens=job.context,
            computed_tokens=request.prompt_tokens - job.context,
            compute_ns=_ns(job.compute_s),
            adapter_ns=_ns(job.setup_s),
        )
        self._system.policy.first_token(request.request_id, self._workers[node], seen, _ns(now))
        for home, size in self._store.keep(request.keys, node, _ns(now), request.prompt_tokens).items():
            self._links.transfer({node: size}, home, now, read=False)
        lead = self._leads.pop(request.request_id, None)
        if lead is not None:
            self._flights.end(lead[0], len(request.keys))
            for follower in self._following.pop(id(lead[0]), ()):
                self._release(follower, follower.fate.worker, now)
        self._hand_over(fate, node, now)

    # Decode

    def _hand_over(self, fate: Fate, node: int, now: float) -> None:
        request = fate.request
        size = request.prompt_tokens + request.output_tokens
        if self._admission is not None:
            taken = self._admission.prefilled(request.request_id, size, _ns(now))
            self.loads.append((now, self._admission.load()))
            if not taken:
                fate.rejected_s = now
                self._system.policy.ended(request.request_id, self._workers[node], _ns(now))
                return
        number = node - self._world.prefill_nodes
        if number < 0:
            number = min(range(len(self.decode)), key=lambda d: (self.decode[d].tokens, d))
        fate.decoder = self._world.prefill_nodes + number
        came = self._links.transfer({node: float(request.prompt_tokens * self._world.token_bytes)}, fate.decoder, now, read=False)
        if self._system.pulls and not self._system.placed:
            self._store.keep(request.keys, fate.decoder, _ns(now), request.prompt_tokens)
        self._at(came, lambda then: self._decode_from(fate, number, then))

    def _decode_from(self, fate: Fate, number: int, now: float) -> None:
        self.decode[number].add(fate, now)
        self._watch(number, now)

    def _watch(self, number: int, now: float) -> None:
        """Look again when the next answer should be complete; looks that come too early change nothing."""
        when = self.decode[number].next_s(now)
        if when is not None:
            self._at(when, lambda then: self._decoded(number, then))

    def _decoded(self, number: int, now: float) -> None:
        ended = self.decode[number].through(now)
        for fate in ended:
            if self._admission is not None:
                self._admission.ended(fate.request.request_id, _ns(now))
            self._system.policy.ended(fate.request.request_id, self._workers[fate.worker], _ns(now))
        moved, guests = self.decode[number].guest(now)
        for guest in guests:
            self._prefilled(guest, number + self._world.prefill_nodes, now)
        if moved:
            self._at(now, lambda then: self._go_on(number, then))  # behind the guests' own answers, which begin now
        elif ended:
            self._watch(number, now)

    def _go_on(self, number: int, now: float) -> None:
        self.decode[number].go_on(now)
        self._watch(number, now)


def _ns(seconds: float) -> int:
    return int(seconds * SECOND)
