"""Asking nodes for blocks, in rounds: first the likeliest holder of each, then whoever may hold what that one lacks.

One round sends one message to each node that is asked, all at once, and ends when every node has answered, has failed, or has taken longer
than it usually does (`health.py`). What is missing then is asked of the next in order. A late answer is still welcome until
the search is over; after that it is given back. So a dead, frozen or cut-off node delays a search once, by little, where another
node can answer, and where none can the search waits for it as long as its caller does.

A search looks for a leading run: it stops asking for blocks behind one that nobody has. Values stand each for itself and are all asked for.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvpool.client.core import CONTROL_S, Core
from kvpool.client.links import NodeLink
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import Lease
from kvpool.clock import seconds_left
from kvpool.errors import AccessError, DeadlineError, KvpoolError, LimitError, RemoteError

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ROUNDS = 3
"""Nodes that are asked for one block at most."""

Holder = tuple[str, tuple[str, ...]]
"""(node id, node ids from which that node may fetch what it lacks)."""
Answer = tuple[int, Sequence[Any]]
"""(lease id or 0, what was found of each block: something true, or nothing)."""
Ask = Callable[[NodeLink, list[int], tuple[str, ...], float], Awaitable[Answer]]
"""Asks a node for the blocks at some positions, with whom it may fetch from and a time limit in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One message to one node. `task` ends with the connection and the answer, or None when the node failed; it never waits for ever."""

    ref: NodeRef
    positions: list[int]
    task: "asyncio.Task[tuple[NodeLink, Answer] | None]"
    overdue_ns: int


def call(core: Core, ref: NodeRef, positions: list[int], ask: Callable[[NodeLink, float], Awaitable[Answer]], timeout_s: float) -> Call:
    """Ask `ref` about `positions`."""
    now_ns = time.monotonic_ns()
    task = asyncio.get_running_loop().create_task(_ask(core, ref, ask, now_ns + int(timeout_s * 1e9)))
    return Call(ref=ref, positions=positions, task=task, overdue_ns=now_ns + core.links.health.patience_ns(ref))


async def _ask(
    core: Core, ref: NodeRef, ask: Callable[[NodeLink, float], Awaitable[Answer]], deadline_ns: int
) -> tuple[NodeLink, Answer] | None:
    try:
        link = await _timed(core, ref, core.links.link(ref, seconds_left(deadline_ns)))
    except RemoteError as error:
        log.warning("node %s: %s", ref.node_id[:8], error)
        return None
    limit_s = max(seconds_left(deadline_ns), 0.001)
    try:
        return link, await _timed(core, ref, ask(link, limit_s), counts=True)
    except (AccessError, LimitError) as error:
        log.warning("node %s refuses: %s", ref.node_id[:8], error)
        return None
    except DeadlineError as error:
        log.warning("node %s: %s", ref.node_id[:8], error)
        await core.links.gave_up(ref, limit_s, link)
        return None
    except RemoteError as error:
        log.warning("node %s: %s", ref.node_id[:8], error)
        await core.links.failed(ref, link=link)
        return None


async def _timed(core: Core, ref: NodeRef, work: Awaitable[T], *, counts: bool = False) -> T:
    """`work` that makes the node slow while it takes too long, and no longer; with `counts` its time says how long an answer takes."""
    health, done = core.links.health, False
    number = health.begin(ref, time.monotonic_ns())
    try:
        result = await work
        done = True
        return result
    finally:
        health.end(ref, number, time.monotonic_ns(), answered=done and counts)


def leave(core: Core, calls: Sequence[Call]) -> None:
    """Wait for these answers no longer; what they grant is given back when they come."""

    async def give_back(left: Call) -> None:
        try:
            answer = await left.task
        except KvpoolError as error:
            log.debug("node %s, too late: %s", left.ref.node_id[:8], error)
            return
        if answer is not None:
            core.let_go([Lease(answer[0], answer[1][0])], {})

    for each in calls:
        core.background.spawn(give_back(each))


class Search:
    """One search for the blocks at positions 0, 1, 2, ... of a request; `holders[j]` is whom to ask for position j, in order.

    `found[j]` is (number of the lease in `leases`, what the node said), or None. `run` may be called again after `lose`.
    """

    def __init__(self, core: Core, holders: Sequence[Sequence[Holder]], refs: Mapping[str, NodeRef], ask: Ask, deadline_ns: int) -> None:
        self.found: list[tuple[int, Any] | None] = [None] * len(holders)
        self.leases: list[Lease] = []
        self._core = core
        self._holders = holders
        self._refs = refs
        self._ask = ask
        self._deadline_ns = deadline_ns
        self._next = [0] * len(holders)
        self._resting: dict[str, bool] = {}
        self._calls: dict[asyncio.Task[tuple[NodeLink, Answer] | None], Call] = {}

    async def run(self) -> None:
        """Ask until every block that matters is found or nobody is left to ask."""
        try:
            while self._goes_on():
                done, _ = await asyncio.wait(self._calls, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    self._take(self._calls.pop(task), task.result())
        finally:
            leave(self._core, list(self._calls.values()))
            self._calls.clear()

    def lose(self, position: int) -> None:
        """What was found there is no good; the next in order may have it."""
        self.found[position] = None

    def others(self, position: int) -> bool:
        """Whether somebody else can be asked for this block."""
        return self._holder(position) is not None

    def _holder(self, position: int) -> Holder | None:
        """Whom to ask next for a block: nodes that rest are passed over for good."""
        holders = self._holders[position]
        while self._next[position] < len(holders):
            holder = holders[self._next[position]]
            if not self._rests(holder[0]):
                return holder
            self._next[position] += 1
        return None

    def _rests(self, node_id: str) -> bool:
        """Whether a node is to be left alone; looked up once a turn, because there are many blocks and few nodes."""
        rests = self._resting.get(node_id)
        if rests is None:
            rests = self._resting[node_id] = self._core.links.resting(self._refs[node_id])
        return rests

    def _goes_on(self) -> bool:
        """Begin the next round if it is time; whether there is anything to wait for."""
        self._resting.clear()
        wanted = self._wanted()
        return self._start_round(wanted) or any(not each.isdisjoint(wanted) for each in self._asked())

    def _asked(self) -> Iterator[set[int]]:
        return (set(each.positions) for each in self._calls.values())

    def _wanted(self) -> list[int]:
        """Missing blocks that may still be found, up to the first that can't."""
        asked = set[int]().union(*self._asked())
        wanted: list[int] = []
        for position, place in enumerate(self.found):
            if place is None:
                if position not in asked and self._holder(position) is None:
                    if self._core.apart:
                        continue
                    break
                wanted.append(position)
        return wanted

    def _start_round(self, wanted: Sequence[int]) -> bool:
        """Ask the next in order for all that is wanted, unless an answer is still due in time; True when somebody was asked."""
        now_ns = time.monotonic_ns()
        if now_ns >= self._deadline_ns:
            return False
        if any(each.overdue_ns > now_ns and not set(each.positions).isdisjoint(wanted) for each in self._calls.values()):
            return False
        groups: dict[Holder, list[int]] = {}
        for position in wanted:
            holder = self._holder(position)
            if holder is not None:
                self._next[position] += 1
                groups.setdefault(holder, []).append(position)
        for (node_id, fetch_from), positions in groups.items():
            started = self._call(self._refs[node_id], positions, fetch_from)
            self._calls[started.task] = started
        return bool(groups)

    def _call(self, ref: NodeRef, positions: list[int], fetch_from: tuple[str, ...]) -> Call:
        async def ask(link: NodeLink, timeout_s: float) -> Answer:
            return await self._ask(link, positions, fetch_from, timeout_s)

        return call(self._core, ref, positions, ask, min(CONTROL_S, seconds_left(self._deadline_ns)))

    def _patience_s(self) -> float | None:
        """Seconds until the next call is overdue; None when all are: there is nothing to do but wait."""
        now_ns = time.monotonic_ns()
        due = [each.overdue_ns - now_ns for each in self._calls.values() if each.overdue_ns > now_ns]
        return min(due) / 1e9 + 0.001 if due else None

    def _take(self, answered: Call, result: tuple[NodeLink, Answer] | None) -> None:
        """Note what an answer adds; a lease that adds nothing goes back at once."""
        if result is None:
            return
        link, (lease_id, values) = result
        lease, number, used = Lease(link, lease_id), len(self.leases), False
        for position, value in zip(answered.positions, values, strict=True):
            if value and self.found[position] is None:
                self.found[position] = number, value
                used = True
        if used:
            self.leases.append(lease)
        else:
            self._core.let_go([lease], {})
