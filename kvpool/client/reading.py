"""Reading: take what can be had by key (`direct.py`), find the rest, move it, and where that goes wrong go on, all before one deadline.

A node that dies, freezes or delivers damaged bytes in the middle of a transfer costs what it had not delivered yet: those blocks
are asked of the next in their order, and the transfer goes on where it stopped, so the caller sees every block once and in order.

The node of this host is asked first where it holds a copy. Where it holds none it may still fetch the blocks from those that do, and keep
them near (`near_copies` in the cluster's config): the next reader of this host then finds them in its own memory.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

import numpy as np

from kvpool.block import BlockKey
from kvpool.client.asking import MAX_ROUNDS, Answer, Holder, Search
from kvpool.client.core import Core
from kvpool.client.direct import Direct
from kvpool.client.leasing import lease_ms
from kvpool.client.links import NodeLink
from kvpool.client.plan import Piece, alike, leading
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import Payload, Touch, Transfer
from kvpool.clock import seconds_left
from kvpool.policy.placement import NodeState, Placement

_HERE = (-1, ())
"""In `Search.found`: nobody needs to be asked for it any more."""


async def lookup(core: Core, chain: Sequence[BlockKey], deadline_ns: int, known: list[bool] | None = None) -> int:
    """How many leading blocks of `chain` some node holds. Takes no lease. `known`: those that are there, from who has just looked."""
    return leading(await present(core, chain, deadline_ns, known))


async def present(core: Core, chain: Sequence[BlockKey], deadline_ns: int, known: list[bool] | None = None) -> list[bool]:
    """Which blocks of `chain` some node holds, up to the first that none does, but of values all. As `lookup`."""
    await core.links.drop_ended()
    placed, refs = core.placed(chain, 0, len(chain))

    async def ask(link: NodeLink, positions: list[int], fetch_from: tuple[str, ...], timeout_s: float) -> Answer:
        return 0, await link.rpc.lookup([chain[i] for i in positions], timeout_s)

    if not placed:
        return [False] * len(chain)
    holders = holders_of(core, placed, refs, near=False)
    there = await Direct(core, holders, refs, chain, [core.block_tokens] * len(chain), deadline_ns).lookup(known)
    if all(there):
        return there
    search = Search(core, holders, refs, ask, deadline_ns)
    for j in np.flatnonzero(there).tolist():
        search.found[j] = _HERE
    await search.run()
    return [place is not None for place in search.found]


async def load(core: Core, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Touch, deadline_ns: int) -> int:
    """Deliver the leading run of chain[first : first + len(counts)]; how many blocks of it were delivered."""

    def take(j: int, payload: Payload) -> None:
        sink(first + j, payload)

    async def directly(direct: Direct) -> bytearray:
        got = bytearray(len(counts))
        delivered = await direct.deliver(take)
        got[:delivered] = b"\1" * delivered
        return got

    return await _load(core, chain, first, counts, directly, sink, deadline_ns)


async def load_into(
    core: Core,
    chain: Sequence[BlockKey],
    first: int,
    counts: Sequence[int],
    targets: Sequence[Payload],
    deadline_ns: int,
    got: bytearray | None = None,
) -> int:
    """The same into `targets`, uint8 `[payload bytes]` each, in any order; those behind the leading run have unspecified bytes.

    `got`: a byte a block, 1 where it has come already, from wherever a caller could get it directly; then also where it has come by this.
    """

    def take(index: int, payload: Payload) -> None:
        np.copyto(targets[index - first], payload)

    return await _load(core, chain, first, counts, lambda direct: direct.fetch(targets, got), take, deadline_ns)


async def _load(
    core: Core,
    chain: Sequence[BlockKey],
    first: int,
    counts: Sequence[int],
    directly: Callable[[Direct], Awaitable[bytearray]],
    sink: Touch,
    deadline_ns: int,
) -> int:
    """First `directly`, which says what has come, a byte a block; then the rest under leases, up to the first that can't be had."""
    await core.links.drop_ended()
    placed, refs = core.placed(chain, first, len(counts))
    if not placed or seconds_left(deadline_ns) <= 0:
        return 0
    holders = holders_of(core, placed, refs, near=core.links.config.near_copies)
    got = await directly(Direct(core, holders, refs, chain[first : first + len(counts)], counts, deadline_ns))
    return len(got) if all(got) else await _load_leased(core, holders, refs, chain, first, counts, sink, got, deadline_ns)


async def _load_leased(
    core: Core,
    holders: Sequence[Sequence[Holder]],
    refs: Mapping[str, NodeRef],
    chain: Sequence[BlockKey],
    first: int,
    counts: Sequence[int],
    sink: Touch,
    got: bytearray,
    deadline_ns: int,
) -> int:
    """Deliver what is missing in `got`; the length of the leading run then."""
    length_ms = lease_ms(sum(core.framer.frame_bytes(n) for n, came in zip(counts, got, strict=True) if not came), deadline_ns)
    sequence = core.sequence(chain)

    async def ask(link: NodeLink, positions: list[int], fetch_from: tuple[str, ...], timeout_s: float) -> Answer:
        keys = [chain[first + j] for j in positions]
        lease_id, places = await link.rpc.acquire(core.owner, length_ms, keys, timeout_s, sequence=sequence, fetch_from=fetch_from)
        if core.apart:  # a value of another size isn't what is wanted
            lengths = [core.framer.frame_bytes(counts[j]) for j in positions]
            places = [place if place and place[1] == n else None for place, n in zip(places, lengths, strict=True)]
        return lease_id, places

    search = Search(core, holders, refs, ask, deadline_ns)
    for j in range(len(got)):
        if got[j]:
            search.found[j] = _HERE
    suspect: dict[int, list[BlockKey]] = {}
    try:
        while True:
            await search.run()
            transfer = _transfer(core, search, chain, first, counts, got, deadline_ns)
            await core.move(transfer, transfer.read, sink, length_ms)
            for index in transfer.delivered:
                got[index - first] = 1
            for number, indices in transfer.suspect.items():
                suspect.setdefault(number, []).extend(chain[index] for index in indices)
            if not _lose(search, transfer, got, first, apart=core.apart):
                return leading(got)
    finally:
        core.let_go(search.leases, suspect)


def _transfer(
    core: Core, search: Search, chain: Sequence[BlockKey], first: int, counts: Sequence[int], got: bytearray, deadline_ns: int
) -> Transfer:
    """The transfer of what was found and hasn't come yet, up to the first hole, but of values all."""
    pieces: list[Piece] = []
    alone: set[int] = set()
    for j, place in enumerate(search.found):
        if place is None and not core.apart:
            break
        if place is None or got[j]:
            continue
        number, (offset, length) = place
        pieces.append((first + j, length, ((number, offset),)))
        if number not in alone and not search.others(j):
            alone.add(number)
    return Transfer(
        leases=search.leases,
        pieces=pieces,
        chain=chain,
        counts={first + j: n for j, n in enumerate(counts)},
        deadline_ns=deadline_ns,
        hurried=set(range(len(search.leases))) - alone,
        apart=core.apart,
    )


def _lose(search: Search, transfer: Transfer, got: bytearray, first: int, *, apart: bool) -> bool:
    """Forget the places that turned out bad; whether another try could deliver more."""
    bad = transfer.lost | transfer.late | set(transfer.failed)
    damaged = {index - first for indices in transfer.suspect.values() for index in indices}
    missing = [j for j, came in enumerate(got) if not came]
    for j in missing:
        place = search.found[j]
        if place is not None and (place[0] in bad or j in damaged):
            search.lose(j)
    wanted = missing if apart else missing[:1]
    return bool(bad or damaged) and any(search.found[j] is None and search.others(j) for j in wanted)


def holders_of(core: Core, placed: Sequence[Placement], refs: Mapping[str, NodeRef], *, near: bool) -> list[tuple[Holder, ...]]:
    """Whom to ask for each block: a list for each extent, shared by its blocks."""
    if placed and alike(placed):
        return [_holders(core, placed[0], refs, near=near)] * len(placed)
    known: dict[Placement, tuple[Holder, ...]] = {}
    found: list[tuple[Holder, ...]] = []
    last: Placement | None = None
    holders: tuple[Holder, ...] = ()
    for one in placed:
        if one is not last:  # blocks of an extent share it
            last = one
            if one not in known:
                known[one] = _holders(core, one, refs, near=near)
            holders = known[one]
        found.append(holders)
    return found


def _holders(core: Core, placement: Placement, refs: Mapping[str, NodeRef], *, near: bool) -> tuple[Holder, ...]:
    """The extent's order, with the node of this host in front if it has a copy, and nodes that are slow right now at the end.

    With `near` the node of this host goes first also when it has none: it may fetch one.
    """

    def here(ref: NodeRef) -> bool:
        return core.host != "" and ref.placed.host == core.host and ref.placed.state is NodeState.ACTIVE

    order = sorted(placement.order, key=lambda node_id: (core.links.slow(refs[node_id]), not here(refs[node_id])))[:MAX_ROUNDS]
    holders: list[Holder] = [(node_id, ()) for node_id in order]
    neighbours = [ref for ref in refs.values() if here(ref) and not core.links.slow(ref)] if near and order else []
    if neighbours and not any(here(refs[node_id]) for node_id in placement.order):
        holders.insert(0, (neighbours[0].node_id, tuple(order)))
    return tuple(holders)
