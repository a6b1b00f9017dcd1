"""Writing: every block to all of its nodes at once. It is held as soon as one of them has it; copies that are missing are counted.

A block that some of its nodes have is written to those that lack it. A node that is late with its answer is not waited for once every
block has another place: what it grants later is given back, and the nodes repair the copy among themselves. Since that is work, a write
waits longer than a read would, half a second and for a new connection as long as it takes, unless the node was late already when the
write began.

*Near copies* go along to nodes where the blocks are wanted next (`also`). No block is held because of one, and none is missed. Their nodes
are never waited for longer than for one that is late: half a second, for a new connection too, and for the bytes what a slow link needs.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

from kvpool.block import BlockKey
from kvpool.client.asking import Answer, Call, call, leave
from kvpool.client.core import CONTROL_S, Core
from kvpool.client.leasing import lease_ms
from kvpool.client.links import NodeLink
from kvpool.client.local import LocalReach
from kvpool.client.plan import Piece, Place
from kvpool.client.putting import Batch, Write, filling, put_here
from kvpool.client.retention import Retention, priority_of
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import Lease, Touch, Transfer
from kvpool.clock import seconds_left
from kvpool.errors import DeadlineError, RemoteError
from kvpool.policy.placement import Placement
from kvpool.request.pool import Outcome, Reservation
from kvpool.units import MS, SECOND

log = logging.getLogger(__name__)

PATIENCE_NS = SECOND // 2


class Stored(NamedTuple):
    """How many of the blocks some node now has, how many copies of those are missing on nodes that should have one, and which those are."""

    held: int
    missing: int
    has: Sequence[bool]


class Wish(NamedTuple):
    """What is to be known of blocks beside their bytes."""

    ttl_ns: int = 0
    retention: Sequence[Retention] = ()
    tenant: str = ""


class _Group(NamedTuple):
    """Positions that one node is to take, in its own right or as `near` copies; the number of the `lease` once it has granted one."""

    ref: NodeRef
    positions: list[int]
    near: bool
    lease: int = -1


_Ask = Callable[[_Group, NodeLink, float], Awaitable[Answer]]
_Take = Callable[[_Group, NodeLink, Answer], None]


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
    """Make chain[first : first + len(counts)] present on its nodes, and try to put near copies onto the nodes `also`."""
    await core.links.drop_ended()
    placed, refs = core.placed(chain, first, len(counts))
    if not placed or seconds_left(deadline_ns) <= 0:
        return Stored(0, 0, [False] * len(counts))
    groups = _groups(core, placed, refs, also)
    has: list[set[str]] = [set() for _ in counts]
    if not any(group.near for group in groups):
        await _put_home(core, placed, groups, chain, first, counts, fill, has, deadline_ns, wish)
        if all(has):
            return Stored(len(has), 0, [True] * len(has))
        groups = [group._replace(positions=[j for j in group.positions if not has[j]]) for group in groups]
    length_ms = lease_ms(sum(map(core.framer.frame_bytes, counts)), deadline_ns)
    blocks = [_reservation(core, chain, first + j, n_tokens, wish) for j, n_tokens in enumerate(counts)]
    sequence = core.sequence(chain)

    async def reserve(group: _Group, link: NodeLink, timeout_s: float) -> Answer:
        wanted, tenant = [blocks[j] for j in group.positions], wish.tenant
        return await link.rpc.reserve(core.owner, length_ms, wanted, timeout_s, sequence=sequence, tenant=tenant, near=group.near)

    promised = {j for j, nodes in enumerate(has) if nodes}
    leases: list[Lease] = []
    near: set[int] = set()
    places: list[list[Place]] = [[] for _ in counts]

    def granted(group: _Group, link: NodeLink, answer: Answer) -> None:
        lease_id, grants = answer
        for j, (outcome, offset) in zip(group.positions, grants, strict=True):
            if outcome is Outcome.EXISTS and not group.near:
                has[j].add(group.ref.node_id)
            elif outcome is Outcome.GRANTED:
                places[j].append((len(leases), offset))
            if outcome in (Outcome.EXISTS, Outcome.GRANTED) and not group.near:
                promised.add(j)
        if lease_id:
            if group.near:
                near.add(len(leases))
            leases.append(Lease(link, lease_id))

    transfer: Transfer | None = None
    ended: set[int] = set()
    try:
        await _ask_each(core, [group for group in groups if group.positions], reserve, granted, promised, deadline_ns)
        transfer = _transfer(core, leases, near, places, chain, first, counts, deadline_ns)
        await core.move(transfer, transfer.write, fill, length_ms)
        ended |= await _commit(core, transfer, near, first, has, Counter(number for some in places for number, _ in some))
    finally:
        left = [number for number in range(len(leases)) if number not in ended and (transfer is None or transfer.settled(number))]
        core.let_go([leases[number] for number in left], {})
    missing = sum(len(set(one.targets) - got) for one, got in zip(placed, has, strict=True) if got)
    return Stored(sum(map(bool, has)), missing, [bool(nodes) for nodes in has])


def home_of(core: Core, placed: Sequence[Placement]) -> LocalReach | None:
    """The reach to the node of this host that is to have all of these blocks, and alone, if it is there. For any thread."""
    targets = placed[0].targets
    if len(targets) == 1 and all(one is placed[0] or one.targets == targets for one in placed):
        for reach in core.links.locals:
            if reach.node_id == targets[0] and reach.alive:
                return reach
    return None


async def _put_home(
    core: Core,
    placed: Sequence[Placement],
    groups: Sequence[_Group],
    chain: Sequence[BlockKey],
    first: int,
    counts: Sequence[int],
    fill: Touch,
    has: Sequence[set[str]],
    deadline_ns: int,
    wish: Wish,
) -> None:
    """Put the blocks that only a node of this host is to have there over its session, and note in `has` that it has them."""
    if len(groups) == 1 and not core.links.connected(groups[0].ref):
        with contextlib.suppress(RemoteError):  # nobody else is to take these blocks, so it may take as long as it takes
            await core.links.link(groups[0].ref, min(CONTROL_S, seconds_left(deadline_ns)))
    for group in groups:
        home = next((reach for reach in core.links.locals if reach.node_id == group.ref.node_id), None)
        positions = [j for j in group.positions if len(placed[j].targets) == 1]
        if home is None or not positions or core.links.slow(group.ref) or not home.alive:
            continue
        indices = [first + j for j in positions]
        write = filling(core.framer, fill, indices)
        batch = batch_of(core, chain, indices, [counts[j] for j in positions], wish, write, lacking_only=True)
        if await core.in_thread(partial(put_here, home, batch), deadline_ns):
            for j in positions:
                has[j].add(home.node_id)


def batch_of(
    core: Core, chain: Sequence[BlockKey], indices: Sequence[int], counts: Sequence[int], wish: Wish, write: Write, *, lacking_only: bool
) -> Batch:
    """The blocks of `chain` at `indices`, to be written by `write`, as they are put on a node of this host."""
    if wish.retention:
        blocks = [_reservation(core, chain, index, n_tokens, wish) for index, n_tokens in zip(indices, counts, strict=True)]
    else:  # by columns: a large put waits for it
        keys, lengths = [chain[i] for i in indices], {n: core.framer.frame_bytes(n) for n in set(counts)}
        parents = [b""] * len(keys) if core.apart else [chain[i - 1] if i else b"" for i in indices]
        depths = [0] * len(keys) if core.apart else [i * core.block_tokens for i in indices]
        blocks = list(map(Reservation, keys, parents, depths, map(lengths.__getitem__, counts), repeat(wish.ttl_ns // MS)))
    return Batch(blocks, counts, write, core.framer, core.sequence(chain), wish.tenant, lacking_only)


def _reservation(core: Core, chain: Sequence[BlockKey], index: int, n_tokens: int, wish: Wish) -> Reservation:
    start, parent = (0, b"") if core.apart or not index else (index * core.block_tokens, chain[index - 1])
    rank = priority_of(wish.retention, start, start + n_tokens)
    return Reservation(chain[index], parent, start, core.framer.frame_bytes(n_tokens), wish.ttl_ns // MS, *rank)


def _groups(core: Core, placed: Sequence[Placement], refs: Mapping[str, NodeRef], also: Collection[str]) -> list[_Group]:
    """Who is to be asked for what; nodes that rest, or are not there any more, get nothing."""
    groups: dict[tuple[str, bool], list[int]] = {}
    wanted: dict[Placement, list[tuple[str, bool]]] = {}
    for position, one in enumerate(placed):
        if one not in wanted:
            wanted[one] = [*((node_id, False) for node_id in one.targets), *((node_id, True) for node_id in _near(one, refs, also))]
        for key in wanted[one]:
            groups.setdefault(key, []).append(position)
    found = [_Group(refs[node_id], some, near) for (node_id, near), some in groups.items() if node_id in refs]
    return [group for group in found if not core.links.resting(group.ref)]


def _near(placement: Placement, refs: Mapping[str, NodeRef], also: Collection[str]) -> list[str]:
    """Those of `also` for which a near copy is of use: none of its targets is that node, or on its host."""
    hosts = {refs[node_id].placed.host for node_id in placement.targets} - {""}
    return [
        node_id
        for node_id in dict.fromkeys(also)
        if node_id in refs and node_id not in placement.targets and refs[node_id].placed.host not in hosts
    ]


async def _ask_each(core: Core, groups: Sequence[_Group], ask: _Ask, take: _Take, served: Collection[int], deadline_ns: int) -> None:
    """Ask all at once and `take` each answer. Once targets can serve nothing that isn't `served`, whoever is overdue is left behind."""

    def start(group: _Group) -> tuple[Call, int]:
        timeout_s = min(CONTROL_S, max(seconds_left(deadline_ns), 0.001))
        patience_ns = PATIENCE_NS if group.near or core.links.connected(group.ref) else int(timeout_s * SECOND)
        until_ns = 0 if core.links.slow(group.ref) else time.monotonic_ns() + patience_ns
        begun = call(core, group.ref, group.positions, lambda link, limit_s: ask(group, link, limit_s), timeout_s)
        return begun, max(begun.overdue_ns, until_ns)

    started = [(group, *start(group)) for group in groups]
    patient_ns = {begun.task: until_ns for _, begun, until_ns in started}
    calls = {begun.task: (group, begun) for group, begun, _ in started}
    try:
        while calls:
            patience_s = None
            if all(group.near or all(j in served for j in group.positions) for group, _ in calls.values()):
                patience_s = seconds_left(max(patient_ns[task] for task in calls))
            done, _ = await asyncio.wait(calls, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return
            for task in done:
                (group, _), result = calls.pop(task), task.result()
                if result is not None:
                    take(group, *result)
    finally:
        leave(core, [begun for _, begun in calls.values()])


def _transfer(
    core: Core,
    leases: Sequence[Lease],
    near: Collection[int],
    places: Sequence[Sequence[Place]],
    chain: Sequence[BlockKey],
    first: int,
    counts: Sequence[int],
    deadline_ns: int,
) -> Transfer:
    pieces: list[Piece] = [(first + j, core.framer.frame_bytes(counts[j]), tuple(some)) for j, some in enumerate(places) if some]
    owned = [[number for number, _ in some if number not in near] for some in places]
    return Transfer(
        leases=leases,
        pieces=pieces,
        chain=chain,
        counts={first + j: n for j, n in enumerate(counts)},
        deadline_ns=deadline_ns,
        hurried=set(range(len(leases))) - {some[0] for some in owned if len(some) == 1},
    )


async def _commit(
    core: Core, transfer: Transfer, near: Collection[int], first: int, has: Sequence[set[str]], granted: Mapping[int, int]
) -> set[int]:
    """Publish what was written and note in `has` which nodes have it now. One place a block is worth waiting for.

    Answers with the leases that ended by it: all that was `granted` under them, so many blocks, is published.
    """
    seen, ended = {j for j, nodes in enumerate(has) if nodes}, set[int]()

    async def commit(group: _Group, link: NodeLink, timeout_s: float) -> Answer:
        keys = [transfer.chain[first + j] for j in group.positions]
        return 0, await link.rpc.commit(transfer.leases[group.lease].id, keys, timeout_s)

    def committed(group: _Group, link: NodeLink, answer: Answer) -> None:
        visible = [j for j, yes in zip(group.positions, answer[1], strict=True) if yes and not group.near]
        seen.update(visible)
        for j in visible:
            has[j].add(group.ref.node_id)
        if all(answer[1]) and len(group.positions) == granted[group.lease]:
            ended.add(group.lease)

    groups = [
        _Group(transfer.leases[number].link.node, [index - first for index in indices], number in near, number)
        for number, indices in transfer.written.items()
        if not isinstance(transfer.failed.get(number), DeadlineError)
    ]
    await _ask_each(core, groups, commit, committed, seen, time.monotonic_ns() + int(CONTROL_S * SECOND))
    return ended
