"""The scheduler: who is admitted, what the next pass computes, who gives way. Pure: events in, decisions out, time is an argument.

Theory. The engine asks for a `Plan` before each pass:

    expire      those whose deadline passed while they waited
    admit       as long as there is a place, and blocks for all the tokens the next one (`waiting.py`) has now, and some to spare
    preempt     when a sequence needs a block and there is none, the one that came last gives its blocks back and waits again, in front
    turns       every sequence that decodes gets one token (continuous batching); besides, prompts get up to `chunk_tokens` tokens,
                the one with the least left first, but for what others have waited (`kvpool.policy.order`), in pieces cut at absolute
                multiples of `chunk_tokens`; one whose KV still comes has a pass to itself. With a target for the time between tokens,
                as much less as `pace.py` says, in pieces cut at multiples of a 16th of that

A preempted sequence loses nothing but time: its finished blocks went to the pool as they were finished, and stay named here until others
need the room; when it comes again, it gathers what is quicker to load than to compute. The sequence that came first is never preempted for
another, and no request is admitted that could not be served by itself, so somebody always moves on.

A pass runs while the world goes on: between `plan` and `done` a work can `leave`, and then loses its blocks when the pass is done.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvpool.engine.paged.blocks import BlockManager, Copy
from kvpool.engine.schedule.pace import Pace
from kvpool.engine.schedule.waiting import Waiting
from kvpool.engine.schedule.work import State, Turn, Work
from kvpool.errors import ConfigError, LocalError, UnavailableError
from kvpool.policy.order import place


class OverloadedError(UnavailableError):
    """This worker holds and queues as many requests as it may; try another one or come back later."""


@dataclass(slots=True)
class Plan:
    """What is to be done now: `copies` before anything else; `turns` are one pass."""

    expired: list[Work] = field(default_factory=list)
    admitted: list[Work] = field(default_factory=list)
    preempted: list[Work] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)


class Scheduler:
    """At most `max_active` works with blocks of `manager` at a time; `max_queued` more wait. `target_ns` between tokens; 0: no target."""

    def __init__(self, manager: BlockManager, *, max_active: int, max_queued: int, chunk_tokens: int, target_ns: int = 0) -> None:
        if max_active < 1 or max_queued < 0:
            raise ConfigError("an engine needs room for at least one active sequence and a queue of 0 or more")
        self.manager = manager
        self.max_active = max_active
        self.max_queued = max_queued
        self.chunk_tokens = chunk_tokens
        self.waiting = Waiting()
        self.preemptions = 0
        self._active: dict[Work, None] = {}  # in order of admission
        self._retiring = 0
        self._orders = self._computed = 0
        self._running: Sequence[Turn] = ()
        self._lone_next = False
        self._pace = Pace(target_ns, chunk_tokens) if target_ns else None

    @property
    def active(self) -> int:
        """Places taken: by works that have blocks, and by those that are gone but not over yet."""
        return len(self._active) + self._retiring

    def submit(self, work: Work) -> None:
        """`work` wants to be served. Raises `OverloadedError` when too many wait, `ConfigError` when it can't ever fit."""
        manager = self.manager
        if manager.blocks_of(work.limit) > manager.capacity:
            raise ConfigError(
                f"this request may need {work.limit} tokens of KV, the worker has room for {manager.capacity * manager.block_tokens}; "
                "raise --kv-memory"
            )
        if len(self.waiting) >= self.max_queued + max(0, self.max_active - self.active):
            raise OverloadedError(f"{self.active} requests are active and {len(self.waiting)} wait; try again later or add workers")
        self._orders += 1
        work.order, work.before, work.state = self._orders, self._computed, State.WAITING
        self.waiting.add(work)

    def plan(self, now_ns: int) -> Plan:
        """What to do now. The turns are to be reported as `done` before the next plan."""
        if self._running:
            raise LocalError("a pass is running; report it as done first")
        plan = Plan()
        for work in self.waiting.expired(now_ns):
            self.leave(work)
            plan.expired.append(work)
        self._admit(plan)
        ready = sorted((work for work in self._active if work.state is State.READY and not work.paused), key=lambda work: work.order)
        budget, cut = self._budget(ready, now_ns)
        ready = self._together(ready)
        for work in (work for work in ready if work.pending == 1):
            self._turn(plan, work, work.known)
        for work in sorted((work for work in ready if work.pending > 1), key=_place):
            start = work.table.tokens
            end = min(work.known, (start // self.chunk_tokens + 1) * self.chunk_tokens)
            if end - start > budget:
                end = (start + budget) // cut * cut
            if end > start:
                budget -= end - start
                self._turn(plan, work, end)
        self._running = plan.turns
        for turn in plan.turns:
            turn.work.running = True
        return plan

    def loaded(self, work: Work, tokens: int) -> None:
        """The first `tokens` tokens of `work` have KV; the rest is to be computed."""
        if work.state is State.LOADING:
            self.manager.advance(work.table, tokens)
            work.state = State.READY

    def done(self, took_ns: int = 0) -> list[Turn]:
        """The pass has run, in `took_ns` (0: not measured): those of its turns whose work is still there. Their tokens have KV now."""
        if self._pace is not None:
            self._pace.ran(sum(turn.end - turn.start for turn in self._running), took_ns)
        turns = self.dropped()
        for turn in turns:
            self._computed += turn.end - turn.start if turn.work.pending > 1 else 0
            self.manager.advance(turn.work.table, turn.end)
        return turns

    def dropped(self) -> list[Turn]:
        """The pass is over and came to nothing: those of its turns whose work is still there."""
        turns, self._running = self._running, ()
        for turn in turns:
            turn.work.running = False
            if turn.work.state is State.GONE:
                self.manager.close(turn.work.table)
        return [turn for turn in turns if turn.work.state is State.READY]

    def leave(self, work: Work) -> bool:
        """`work` has ended, or isn't wanted any more. True when it had a place, which stays taken until `retired`. Again: nothing."""
        if work.state is State.GONE:
            return False
        placed = work.state is not State.WAITING
        if placed:
            del self._active[work]
            self._retiring += 1
            if not work.running:
                self.manager.close(work.table)
        else:
            self.waiting.remove(work)
        work.state = State.GONE
        return placed

    def retired(self) -> None:
        """A work that had a place and is gone needs it no more."""
        self._retiring -= 1

    def works(self) -> Iterable[Work]:
        """Those that have blocks."""
        return self._active

    def _budget(self, ready: list[Work], now_ns: int) -> tuple[int, int]:
        """Prompt tokens of the next pass, and at whose multiples prompts may be cut to keep to that."""
        if self._pace is None:
            return self.chunk_tokens, self.chunk_tokens
        budget = self._pace.budget([work for work in ready if work.pending == 1], now_ns)
        return budget, self.chunk_tokens if budget == self.chunk_tokens else self._pace.part

    def _together(self, ready: list[Work]) -> list[Work]:
        """Those of `ready` that may share a pass: one that must be alone, or all others, in turns."""
        lone = min((work for work in ready if work.alone), key=_place, default=None)
        others = [work for work in ready if not work.alone]
        if lone is not None and (not others or self._lone_next):
            self._lone_next = False
            return [lone]
        self._lone_next = lone is not None
        return others

    def _admit(self, plan: Plan) -> None:
        while self.active < self.max_active and (work := self.waiting.next(self._at_hand)) is not None:
            if not self._open(plan, work):
                return
            self.waiting.remove(work)
            self._active[work] = None
            work.state = State.LOADING
            plan.admitted.append(work)

    def _at_hand(self, work: Work) -> int:
        return min(work.usable, self.manager.match(work.keys)[1])

    def _open(self, plan: Plan, work: Work) -> bool:
        """Give `work` blocks for all its tokens, those that are here already among them; False, and nothing done, if there is no room."""
        manager = self.manager
        blocks, tokens = manager.match(work.keys)
        table = manager.open(blocks, min(tokens, work.usable), span=manager.blocks_of(work.limit))
        spare = len(self._active) + manager.capacity // 100 if self._active else 0
        copies = manager.grow(table, work.known) if manager.lacking(table, work.known) + spare <= manager.available else None
        if copies is None:
            manager.close(table)
            return False
        manager.wanted(work.keys[len(blocks) :])
        work.table = table
        plan.copies += copies
        return True

    def _turn(self, plan: Plan, work: Work, end: int) -> None:
        """Let `work` compute up to `end`, if need be at the cost of those that came last (or not at all)."""
        while work.state is State.READY:
            copies = self.manager.grow(work.table, end)
            if copies is not None:
                plan.copies += copies
                plan.turns.append(Turn(work, work.table.tokens, end))
                return
            taken = {turn.work for turn in plan.turns}
            others = [other for other in self._active if other.state is State.READY and other not in taken]
            self._preempt(plan, max(others, key=lambda other: other.order))

    def _preempt(self, plan: Plan, work: Work) -> None:
        self.manager.close(work.table)
        del self._active[work]
        work.state, work.usable = State.WAITING, work.known - 1
        work.preempted += 1
        self.preemptions += 1
        self.waiting.add(work)
        plan.preempted.append(work)


def _place(work: Work) -> tuple[float, int]:
    return place(work.pending, work.before), work.order
