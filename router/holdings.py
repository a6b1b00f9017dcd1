"""What workers and the pool hold of a prompt, as far as this router knows: the index, and the pool's own word where that is incomplete.

The index is fed by events (`router/feeds`) and by what requests show. While some node's blocks aren't in it yet the pool is asked, once per
request (`probe.py`). What somebody said in between, a prefill that published or the leader of a flight, counts besides (`need.py`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from kvpool.cluster import Identity, Member
from kvpool.policy.placement import NodeState
from kvpool.policy.prefix import Match, PrefixIndex, Reach
from kvpool.policy.routing import Source, Tier, WorkerRef
from kvpool.request.events import BESIDE, NO_PRESSURE, Pressure
from router.feeds import Feeds
from router.need import Need
from router.pool import PoolView, placed_nodes
from router.probe import GuardedProbe
from router.worker import Worker

Index = PrefixIndex[WorkerRef]
"""Holders are workers and nodes alike, a node as `WorkerRef("node", id, incarnation)`."""


class Holdings:
    """What is known of who holds what."""

    def __init__(self, index: Index, view: PoolView, probe: GuardedProbe, feeds: Feeds | None) -> None:
        """`feeds` fill the index; without them the pool is always asked."""
        self.index = index
        self._view = view
        self._probe = probe
        self._feeds = feeds
        self._known: tuple[tuple[Member, ...], frozenset[Identity], Nodes] | None = None

    @property
    def complete(self) -> bool:
        """Whether the index has the blocks of all live nodes."""
        return self._feeds is not None and self._feeds.complete()

    def counts(self) -> dict[str, int]:
        """What the feeds count."""
        return {} if self._feeds is None else self._feeds.counts()

    def start(self) -> None:
        """Follow what members tell from now on; call on the event loop."""
        if self._feeds is not None:
            self._feeds.start()

    async def look(self, need: Need, worker: Worker) -> int:
        """Leading blocks of the prompt that the pool holds for `worker`."""
        keys = need.keys(worker)
        if not need.known(worker) and keys and not self.complete:
            need.hold(worker, await self._probe.longest_prefix(keys, worker.block_tokens) or 0)
        reach = self.index.match(keys).together((), self._nodes().refs)
        return max(reach.blocks, need.held(worker))

    def resident(self, need: Need, worker: Worker, seen: "Seen") -> int:
        """Leading tokens of the prompt in `worker`, less what it isn't believed."""
        blocks = self.index.credited(worker.ref, seen.match.of(worker.ref))
        return min(len(need.job.prompt), blocks * worker.block_tokens)

    def most_resident(self, need: Need, like: Worker, workers: Sequence[Worker]) -> int:
        """Leading blocks of the prompt in the one of `workers` that has most; those of another namespace than `like` don't count."""
        keys = need.keys(like)
        match = self.index.match(keys)
        return max((self.index.credited(w.ref, match.of(w.ref)) for w in workers if need.keys(w) is keys), default=0)

    def sources(self, need: Need, worker: Worker, seen: "Seen", resident: int) -> tuple[Source, ...]:
        """What `worker` would load of the rest of the prompt, behind its `resident` tokens."""
        size, skip = worker.block_tokens, resident
        found: list[Source] = []
        for source in seen.sources_at(worker.host, size):
            if source.tokens > skip:
                found.append(source._replace(tokens=source.tokens - skip))
            skip = max(0, skip - source.tokens)
        known = resident + sum(source.tokens for source in found)
        said = min(len(need.job.prompt), need.held(worker) * size)
        if said > known:
            found.append(Source(Tier.DRAM, seen.nodes.all_at(worker.host), said - known))
        return tuple(found)

    def see(self, need: Need, worker: Worker) -> "Seen":
        """Who holds what of the prompt, in the worker's namespace. Of the moment."""
        return Seen(self.index.match(need.keys(worker)), self._nodes(), self.pool_pressure())

    def pressure(self, holder: WorkerRef) -> Pressure:
        """How scarce memory is in a worker or a node, as it said last."""
        return NO_PRESSURE if self._feeds is None else self._feeds.pressure(holder)

    def nodes(self) -> tuple[WorkerRef, ...]:
        """The pool's nodes that live."""
        return self._nodes().refs

    def pool_pressure(self) -> Pressure:
        """The same of all nodes together, in bytes: a block goes to any of them."""
        each = [self.pressure(node) for node in self.nodes()]
        return Pressure(sum(one.free for one in each), sum(one.price for one in each) / len(each)) if each else NO_PRESSURE

    def learn(self, worker: Worker, need: Need, generated: list[int] | None = None) -> None:
        """`worker` holds the prompt, and the answer if it is given: it has just worked with it. One that tells says so itself."""
        if self._feeds is not None and self._feeds.tells(worker.ref):
            return
        keys = need.keys(worker) if generated is None else need.keys_with(worker, generated)
        if keys:
            self.index.stored(worker.ref, keys, BESIDE)

    def proved(self, worker: Worker, claimed_tokens: int, found_tokens: int) -> None:
        """A request found `found_tokens` in `worker`, which was said to have `claimed_tokens`."""
        self.index.proved(worker.ref, claimed_tokens // worker.block_tokens, found_tokens // worker.block_tokens)

    async def close(self) -> None:
        """Disconnect from the pool."""
        if self._feeds is not None:
            await self._feeds.close()
        await self._probe.close()

    def _nodes(self) -> "Nodes":
        members, ill = self._view.members(), self._view.quarantined()
        if self._known is None or self._known[0] is not members or self._known[1] != ill:
            self._known = members, ill, Nodes.of(self._view)
        return self._known[2]


class Nodes(NamedTuple):
    """The pool's nodes: all, and the ids of those in full service by host."""

    refs: tuple[WorkerRef, ...]
    at: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, view: PoolView) -> Self:
        """As `view` has them now."""
        at: dict[str, set[str]] = {}
        for node in placed_nodes(view):
            if node.host and node.state is NodeState.ACTIVE:
                at.setdefault(node.host, set()).add(node.id)
        refs = tuple(WorkerRef("node", member.id, member.incarnation) for member in view.members("node"))
        return cls(refs, {host: frozenset(ids) for host, ids in at.items()})

    def all_at(self, host: str) -> bool:
        """Whether there is no node elsewhere."""
        return bool(self.refs) and len(self.at.get(host, ())) == len(self.refs)


class Seen:
    """What is known of one prompt at one moment; what the pool holds is worked out once for each host."""

    def __init__(self, match: Match[WorkerRef], nodes: Nodes, pressure: Pressure) -> None:
        """`pressure`: that of the pool."""
        self.match = match
        self.nodes = nodes
        self.pressure = pressure
        self._sources: dict[str, list[Source]] = {}

    def sources_at(self, host: str, block_tokens: int) -> list[Source]:
        """What a worker on `host` would load of the whole prompt, the quickest first."""
        if host not in self._sources:
            here = self.nodes.at.get(host, frozenset())
            near = [ref for ref in self.nodes.refs if ref.id in here]
            far = [ref for ref in self.nodes.refs if ref.id not in here]
            self._sources[host] = _sources(self.match.together(near, far), block_tokens)
        return self._sources[host]


def _sources(reach: Reach, size: int) -> list[Source]:
    """By tier and nearness, the quickest first."""
    counts = (
        (Tier.GPU, True, reach.near_gpu),
        (Tier.DRAM, True, reach.near_dram),
        (Tier.GPU, False, reach.far_gpu),
        (Tier.DRAM, False, reach.far_dram),
        (Tier.SSD, True, reach.near_below),
        (Tier.SSD, False, reach.far_below),
    )
    return [Source(tier, near, blocks * size) for tier, near, blocks in counts if blocks]
