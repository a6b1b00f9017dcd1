"""Writing: every block to all of its nodes at once. It is held as soon as one of them has it; copies that are missing are counted.

A block that some of its nodes have is written to those that lack it. A node that is late with its answer is not waited for once every
block has another place: what it grants later is given back, and the nodes repair the copy among themselves. Since that is work, a write
waits longer than a read would, half a second and for a new connection as long as it takes, unless the node was late already when the
write began.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from kvpool.block import BlockKey
from kvpool.client.asking import Answer, Call, call, leave
from kvpool.client.core import CONTROL_S, Core
from kvpool.client.leasing import lease_ms
from kvpool.client.links import NodeLink
from kvpool.client.plan import Piece, Place
from kvpool.client.retention import Retention, priority_of
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import Lease, Touch, Transfer
from kvpool.clock import seconds_left
from kvpool.policy.placement import Placement
from kvpool.request.pool import Outcome, Reservation
from kvpool.units import MS, SECOND

log = logging.getLogger(__name__)

PATIENCE_NS = SECOND // 2


class Stored(NamedTuple):
    """How many of the blocks some node now has, and how many copies of those are missing on nodes that should have one."""

    held: int
    missing: int


class Wish(NamedTuple):
    """What is to be known of blocks beside their bytes."""

    ttl_ns: int = 0
    retention: Sequence[Retention] = ()
    tenant: str = ""


async def store(
    core: Core,
    chain: Sequence[BlockKey],
    first: int,
    counts: Sequence[int],
    fill: Touch,
    *,
    deadline_ns: int,
    wish: Wish,
    also: Collection[str] = (),
) -> Stored:
    """Make chain[first : first + len(counts)] present on its nodes, and on those of `also`."""
    placed, refs = core.placed(chain, first, len(counts))
    if not placed or seconds_left(deadline_ns) <= 0:
        return Stored(0, 0)
    length_ms = lease_ms(sum(map(core.framer.frame_bytes, counts)), deadline_ns)
    blocks = [_reservation(core, chain, first + j, n_tokens, wish) for j, n_tokens in enumerate(counts)]
    sequence = len(chain) * core.block_tokens

    async def reserve(link: NodeLink, positions: list[int], timeout_s: float) -> Answer:
        wanted = [blocks[j] for j in positions]
        return await link.rpc.reserve(core.owner, length_ms, wanted, timeout_s, sequence=sequence, tenant=wish.tenant)

    has: list[set[str]] = [set() for _ in counts]
    leases: list[Lease] = []
    places: list[list[Place]] = [[] for _ in counts]

    def granted(answered: Call, link: NodeLink, answer: Answer) -> None:
        lease_id, grants = answer
        for j, (outcome, offset) in zip(answered.positions, grants, strict=True):
            if outcome is Outcome.EXISTS:
                has[j].add(answered.ref.node_id)
            elif outcome is Outcome.GRANTED:
                places[j].append((len(leases), offset))
        if lease_id:
            leases.append(Lease(link, lease_id))

    groups = _groups(core, placed, refs, also)
    try:
        await _ask_each(core, refs, groups, reserve, granted, lambda j: bool(has[j] or places[j]), deadline_ns)
        transfer = _transfer(core, leases, places, chain, first, counts, deadline_ns)
        await core.move(transfer, transfer.write, fill, length_ms)
        for node_id, positions in (await _commit(core, transfer, first, has)).items():
            for j in positions:
                has[j].add(node_id)
    finally:
        core.let_go(leases, {})
    missing = sum(len(set(one.targets) - got) for one, got in zip(placed, has, strict=True) if got)
    return Stored(sum(map(bool, has)), missing)


def _reservation(core: Core, chain: Sequence[BlockKey], index: int, n_tokens: int, wish: Wish) -> Reservation:
    start, parent = index * core.block_tokens, chain[index - 1] if index else b""
    rank = priority_of(wish.retention, start, start + n_tokens)
    return Reservation(chain[index], parent, start, core.framer.frame_bytes(n_tokens), wish.ttl_ns // MS, *rank)


def _groups(core: Core, placed: Sequence[Placement], refs: Mapping[str, NodeRef], also: Collection[str]) -> dict[str, list[int]]:
    """Positions by node to write to; nodes that rest, or are not there any more, get nothing."""
    groups: dict[str, list[int]] = {}
    for position, one in enumerate(placed):
        for node_id in dict.fromkeys((*one.targets, *also)):
            groups.setdefault(node_id, []).append(position)
    return {node_id: some for node_id, some in groups.items() if node_id in refs and not core.links.resting(refs[node_id])}


async def _ask_each(
    core: Core,
    refs: Mapping[str, NodeRef],
    groups: Mapping[str, list[int]],
    ask: Callable[[NodeLink, list[int], float], Any],
    take: Callable[[Call, NodeLink, Answer], None],
    served: Callable[[int], bool],
    deadline_ns: int,
) -> None:
    """Ask all at once and `take` each answer. Once every position is `served`, whoever is overdue is left behind."""

    def start(node_id: str, positions: list[int]) -> tuple[Call, int]:
        timeout_s = min(CONTROL_S, max(seconds_left(deadline_ns), 0.001))
        patience_ns = PATIENCE_NS if core.links.connected(refs[node_id]) else int(timeout_s * SECOND)
        until_ns = 0 if core.links.slow(refs[node_id]) else time.monotonic_ns() + patience_ns
        begun = call(core, refs[node_id], positions, lambda link, limit_s: ask(link, positions, limit_s), timeout_s)
        return begun, max(begun.overdue_ns, until_ns)

    started = [start(*group) for group in groups.items()]
    patient_ns = {begun.task: until_ns for begun, until_ns in started}
    calls = {begun.task: begun for begun, _ in started}
    try:
        while calls:
            patience_s = None
            if all(served(j) for each in calls.values() for j in each.positions):
                patience_s = seconds_left(max(patient_ns[task] for task in calls))
            done, _ = await asyncio.wait(calls, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            for task in done:
                answered, result = calls.pop(task), task.result()
                if result is not None:
                    take(answered, *result)
    finally:
        leave(core, list(calls.values()))


def _transfer(
    core: Core,
    leases: Sequence[Lease],
    places: Sequence[Sequence[Place]],
    chain: Sequence[BlockKey],
    first: int,
    counts: Sequence[int],
    deadline_ns: int,
) -> Transfer:
    pieces: list[Piece] = [(first + j, core.framer.frame_bytes(counts[j]), tuple(some)) for j, some in enumerate(places) if some]
    return Transfer(
        leases=leases,
        pieces=pieces,
        chain=chain,
        counts={first + j: n for j, n in enumerate(counts)},
        deadline_ns=deadline_ns,
        hurried=set(range(len(leases))) - {some[0][0] for some in places if len(some) == 1},
    )


async def _commit(core: Core, transfer: Transfer, first: int, has: Sequence[set[str]]) -> dict[str, list[int]]:
    """Publish what was written; the positions that this made visible, by node. One place a block is worth waiting for."""
    visible: dict[str, list[int]] = {}
    seen = {j for j, nodes in enumerate(has) if nodes}
    numbers = {transfer.leases[number].link.node.node_id: number for number in transfer.written if number not in transfer.failed}

    async def commit(link: NodeLink, positions: list[int], timeout_s: float) -> Answer:
        lease_id = transfer.leases[numbers[link.node.node_id]].id
        return 0, await link.rpc.commit(lease_id, [transfer.chain[first + j] for j in positions], timeout_s)

    def committed(answered: Call, link: NodeLink, answer: Answer) -> None:
        visible[answered.ref.node_id] = [j for j, yes in zip(answered.positions, answer[1], strict=True) if yes]
        seen.update(visible[answered.ref.node_id])

    groups = {node_id: [index - first for index in transfer.written[number]] for node_id, number in numbers.items()}
    refs = {node_id: transfer.leases[number].link.node for node_id, number in numbers.items()}
    end_ns = time.monotonic_ns() + int(CONTROL_S * 1e9)
    await _ask_each(core, refs, groups, commit, committed, seen.__contains__, end_ns)
    return visible
