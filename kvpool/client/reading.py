"""Reading: find the leading run, move it, and where that goes wrong find and move the rest, all before one deadline.

A node that dies, freezes or delivers damaged bytes in the middle of a transfer costs what it had not delivered yet: those blocks
are asked of the next in their order, and the transfer goes on where it stopped, so the caller sees every block once and in order.

The node of this host is asked first where it holds a copy. Where it holds none it may still fetch the blocks from those that do, and keep
them near (`near_copies` in the cluster's config): the next reader of this host then finds them in its own memory.
"""

from collections.abc import Mapping, Sequence

from kvpool.block import BlockKey
from kvpool.client.asking import MAX_ROUNDS, Answer, Holder, Search
from kvpool.client.core import Core
from kvpool.client.leasing import lease_ms
from kvpool.client.links import NodeLink
from kvpool.client.plan import Piece, leading
from kvpool.client.sources import NodeRef
from kvpool.client.transfer import Touch, Transfer
from kvpool.clock import seconds_left
from kvpool.policy.placement import NodeState, Placement


async def lookup(core: Core, chain: Sequence[BlockKey], deadline_ns: int) -> int:
    """How many leading blocks of `chain` some node holds. Takes no lease."""
    placed, refs = core.placed(chain, 0, len(chain))

    async def ask(link: NodeLink, positions: list[int], fetch_from: tuple[str, ...], timeout_s: float) -> Answer:
        return 0, await link.rpc.lookup([chain[i] for i in positions], timeout_s)

    search = Search(core, holders_of(core, placed, refs, near=False), refs, ask, deadline_ns)
    await search.run()
    return leading(search.found)


async def load(core: Core, chain: Sequence[BlockKey], first: int, counts: Sequence[int], sink: Touch, deadline_ns: int) -> int:
    """Deliver the leading run of chain[first : first + len(counts)]; how many blocks of it were delivered."""
    placed, refs = core.placed(chain, first, len(counts))
    if seconds_left(deadline_ns) <= 0:
        return 0
    length_ms = lease_ms(sum(map(core.framer.frame_bytes, counts)), deadline_ns)
    sequence = len(chain) * core.block_tokens

    async def ask(link: NodeLink, positions: list[int], fetch_from: tuple[str, ...], timeout_s: float) -> Answer:
        keys = [chain[first + j] for j in positions]
        return await link.rpc.acquire(core.owner, length_ms, keys, timeout_s, sequence=sequence, fetch_from=fetch_from)

    search = Search(core, holders_of(core, placed, refs, near=core.links.config.near_copies), refs, ask, deadline_ns)
    suspect: dict[int, list[BlockKey]] = {}
    done = 0
    try:
        while True:
            await search.run()
            transfer = _transfer(core, search, chain, first, counts, done, deadline_ns)
            await core.move(transfer, transfer.read, sink, length_ms)
            done += transfer.done
            for number, indices in transfer.suspect.items():
                suspect.setdefault(number, []).extend(chain[index] for index in indices)
            if not _lose(search, transfer, done, first):
                return done
    finally:
        core.let_go(search.leases, suspect)


def _transfer(
    core: Core, search: Search, chain: Sequence[BlockKey], first: int, counts: Sequence[int], done: int, deadline_ns: int
) -> Transfer:
    """The transfer of what was found from position `done` on, up to the first hole."""
    pieces: list[Piece] = []
    alone: set[int] = set()
    for j, place in enumerate(search.found[done:], done):
        if place is None:
            break
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
    )


def _lose(search: Search, transfer: Transfer, done: int, first: int) -> bool:
    """Forget the places that turned out bad; whether another try could deliver more."""
    bad = transfer.lost | transfer.late | set(transfer.failed)
    damaged = {index - first for indices in transfer.suspect.values() for index in indices}
    for j in range(done, len(search.found)):
        place = search.found[j]
        if place is not None and (place[0] in bad or j in damaged):
            search.lose(j)
    return done < len(search.found) and search.found[done] is None and bool(bad or damaged) and search.others(done)


def holders_of(core: Core, placed: Sequence[Placement], refs: Mapping[str, NodeRef], *, near: bool) -> list[tuple[Holder, ...]]:
    """Whom to ask for each block: a list for each extent, shared by its blocks."""
    known: dict[Placement, tuple[Holder, ...]] = {}
    for one in placed:
        if one not in known:
            known[one] = _holders(core, one, refs, near=near)
    return [known[one] for one in placed]


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
