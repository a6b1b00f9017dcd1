"""What a routing policy is asked and what it answers: the contract of every file beside this one.

A policy ranks workers for one request; it moves nothing. It is told what really happened (`routed`, `first_token`, `ended`), from which
those that learn do so. It has no clock and no randomness of its own: time is an argument, and a policy that draws takes a seed when
it is made. Equal calls in equal order give equal answers.

What a prompt needs is split per candidate::

    prompt = resident | pool, source by source | missing
             in the     loaded from a tier,       computed
             worker     near or remote

Every ranking carries its terms by name, seconds where the policy reckons in time, so that anyone can print why.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol


class WorkerRef(NamedTuple):
    """A worker's identity: role, UUID and incarnation, never an address."""

    role: str
    id: str
    incarnation: int


class Tier(StrEnum):
    """On what the pool keeps a block."""

    GPU = "gpu"
    DRAM = "dram"
    SSD = "ssd"


class Source(NamedTuple):
    """Tokens of the prompt that the pool holds on `tier`, on a node beside the worker (`near`) or behind a network.

    `busy_s`: seconds until that source could begin to send; 0 when idle or unknown.
    """

    tier: Tier
    near: bool
    tokens: int
    busy_s: float = 0.0


class Pending(NamedTuple):
    """Leading `tokens` of the prompt that `worker` is computing now for another request; they are there at about `ready_ns`."""

    worker: WorkerRef
    tokens: int
    ready_ns: int


class Ask(NamedTuple):
    """One request as routing sees it. Tokens are counts, times are nanoseconds of the clock that `rank` is given.

    `adapter`: name of its LoRA adapter, "" for none. `priority`: 0..100, 50 as usual, more is sooner. `deadline_ns`: 0 for none.
    `tenant_share`: what the tenant has in work now over its fair share of it; 1 or less: nothing to make up for.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int = 0
    session: str = ""
    tenant: str = ""
    adapter: str = ""
    priority: int = 50
    arrived_ns: int = 0
    deadline_ns: int = 0
    tenant_share: float = 0.0
    pending: tuple[Pending, ...] = ()


class Candidate(NamedTuple):
    """A worker that could serve, and what is known of it now.

    `resident_tokens`: leading tokens of the prompt in the worker itself. `pool`: what it would load of the rest, contiguous behind them.
    `active`: requests there. `queued`: those of them whose first token is still to come. `backlog_tokens`: prompt tokens that are
    to be computed there before a new one's turn. `decode_tokens` of `decode_capacity` (0: unknown): KV in use by answers under way.
    `free_tokens`: room for new KV; `price_s`: seconds of recompute that one more token of KV there costs by what must leave for it
    (`policy/price.py`); `pool_free_tokens` and `pool_price_s`: the same of the pool, where what is computed goes too. `adapter_loaded`:
    whether the request's adapter is there (true when it has none). `suspect`: it failed a moment ago.
    """

    worker: WorkerRef
    resident_tokens: int = 0
    pool: tuple[Source, ...] = ()
    active: int = 0
    queued: int = 0
    backlog_tokens: int = 0
    decode_tokens: int = 0
    decode_capacity: int = 0
    free_tokens: int = 0
    price_s: float = 0.0
    pool_free_tokens: int = 0
    pool_price_s: float = 0.0
    adapter_loaded: bool = True
    suspect: bool = False

    @property
    def near_tokens(self) -> int:
        """Leading tokens that need no network: resident ones, and near ones of the pool behind them."""
        tokens = self.resident_tokens
        for source in self.pool:
            if not source.near:
                break
            tokens += source.tokens
        return tokens

    @property
    def held_tokens(self) -> int:
        """Leading tokens that are resident or anywhere in the pool."""
        return self.resident_tokens + sum(source.tokens for source in self.pool)


class Scored(NamedTuple):
    """One candidate with its cost (the lower the better) and what the cost is made of, by name.

    `fetch_tokens` are loaded from the pool, `compute_tokens` computed; the rest of the prompt is resident. `wait_ns`: how long it is best
    to wait for somebody else's computation before it begins, 0 for not at all.
    """

    candidate: Candidate
    cost: float
    terms: tuple[tuple[str, float], ...]
    fetch_tokens: int = 0
    compute_tokens: int = 0
    wait_ns: int = 0

    @property
    def worker(self) -> WorkerRef:
        """Whose score it is."""
        return self.candidate.worker


class Ranking(NamedTuple):
    """Candidates best first; the first is the choice. `unit`: of costs and terms ("s", "tokens", "blocks", "requests" or "")."""

    policy: str
    unit: str
    scored: tuple[Scored, ...]

    @property
    def best(self) -> Scored:
        """The choice."""
        return self.scored[0]

    def explain(self) -> str:
        """One line: every candidate with its cost and its terms, best first."""
        return f"{self.policy}: " + "; ".join(
            f"{scored.worker.id[:8]} {scored.cost:.4g}{self.unit and ' ' + self.unit} = "
            + (" + ".join(f"{value:.4g} {name}" for name, value in scored.terms) or "drawn")
            + (" (suspect)" if scored.candidate.suspect else "")
            for scored in self.scored
        )


class Load(NamedTuple):
    """What one load from the pool really took: `tokens` from `tier`, near or not, in `load_ns`."""

    tier: Tier
    near: bool
    tokens: int
    load_ns: int


class Observed(NamedTuple):
    """How a first token came about: time in the worker's queue, loads, and `computed_tokens` behind `context_tokens` in `compute_ns`.

    `adapter_ns`: time it took to load the request's adapter, 0 when it was there.
    """

    queue_ns: int = 0
    loads: tuple[Load, ...] = ()
    context_tokens: int = 0
    computed_tokens: int = 0
    compute_ns: int = 0
    adapter_ns: int = 0


class Policy(Protocol):
    """Which worker: one file per policy, by name with `make_policy`."""

    name: str

    def rank(self, ask: Ask, candidates: Sequence[Candidate], now_ns: int) -> Ranking | None:
        """Candidates best first, suspects behind all others; None without candidates.

        All are for one phase: decode workers alone are ranked for the answer, among prefill workers for doing the prefill themselves.
        """
        ...

    def routed(self, ask: Ask, scored: Scored, now_ns: int) -> None:
        """The request has been sent to `scored.worker`, ranked first or not."""
        ...

    def first_token(self, request_id: str, worker: WorkerRef, observed: Observed, now_ns: int) -> None:
        """`worker` has sent the request's first token; unknown requests still teach rates."""
        ...

    def ended(self, request_id: str, worker: WorkerRef, now_ns: int) -> None:
        """The request is over on `worker`, done or failed, with or without a first token; unknown ones are ignored."""
        ...

    def forget(self, worker: WorkerRef) -> None:
        """That incarnation is gone, and all it was busy with."""
        ...
