"""What workers and the pool hold of a prompt, as far as this router knows: the index, and the pool's own word where that is incomplete.

The index is fed by events (`router/feeds`) and by what requests show. While some node's blocks aren't in it yet the pool is asked, once per
request (`probe.py`). What somebody said in between, a prefill that published or the leader of a flight, counts besides (`need.py`).
"""

from collections.abc import Sequence

from kvpool.policy.placement import NodeState
from kvpool.policy.prefix import Match, PrefixIndex, Reach
from kvpool.policy.routing import Source, Tier, WorkerRef
from kvpool.request.events import BESIDE
from router.feeds import MemberFeeds
from router.need import Need
from router.pool import PoolView, placed_nodes
from router.probe import GuardedProbe
from router.worker import Worker

Index = PrefixIndex[WorkerRef]
"""Holders are workers and nodes alike, a node as `WorkerRef("node", id, incarnation)`."""


class Holdings:
    """What is known of who holds what."""

    def __init__(self, index: Index, view: PoolView, probe: GuardedProbe, feeds: MemberFeeds | None) -> None:
        """`feeds` fill the index; without them the pool is always asked."""
        self.index = index
        self._view = view
        self._probe = probe
        self._feeds = feeds

    @property
    def complete(self) -> bool:
        """Whether the index has the blocks of all live nodes."""
        return self._feeds is not None and self._feeds.complete()

    def start(self) -> None:
        """Follow what members tell from now on; call on the event loop."""
        if self._feeds is not None:
            self._feeds.start()

    async def look(self, need: Need, worker: Worker) -> int:
        """Leading blocks of the prompt that the pool holds for `worker`."""
        keys = need.keys(worker)
        if not need.known(worker) and keys and not self.complete:
            need.hold(worker, await self._probe.longest_prefix(keys, worker.block_tokens) or 0)
        reach = self.index.match(keys).together((), self._nodes())
        return max(reach.blocks, need.held(worker))

    def resident(self, need: Need, worker: Worker, match: "Match[WorkerRef]") -> int:
        """Leading tokens of the prompt in `worker`, less what it isn't believed."""
        blocks = self.index.credited(worker.ref, match.of(worker.ref))
        return min(len(need.job.prompt), blocks * worker.block_tokens)

    def most_resident(self, need: Need, like: Worker, workers: Sequence[Worker]) -> int:
        """Leading blocks of the prompt in the one of `workers` that has most; those of another namespace than `like` don't count."""
        keys = need.keys(like)
        match = self.index.match(keys)
        return max((self.index.credited(w.ref, match.of(w.ref)) for w in workers if need.keys(w) is keys), default=0)

    def sources(self, need: Need, worker: Worker, match: "Match[WorkerRef]", resident: int) -> tuple[Source, ...]:
        """What `worker` would load of the rest of the prompt, behind its `resident` tokens."""
        near, far = self._split(worker.host)
        size, skip = worker.block_tokens, resident
        found: list[Source] = []
        for source in _sources(match.together(near, far), size):
            if source.tokens > skip:
                found.append(source._replace(tokens=source.tokens - skip))
            skip = max(0, skip - source.tokens)
        known = resident + sum(source.tokens for source in found)
        said = min(len(need.job.prompt), need.held(worker) * size)
        if said > known:
            found.append(Source(Tier.DRAM, bool(near) and not far, said - known))
        return tuple(found)

    def match(self, need: Need, worker: Worker) -> "Match[WorkerRef]":
        """Who holds what of the prompt, in the worker's namespace. Of the moment."""
        return self.index.match(need.keys(worker))

    def learn(self, worker: Worker, need: Need, generated: list[int] | None = None) -> None:
        """`worker` holds the prompt, and the answer if it is given: it has just worked with it."""
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

    def _nodes(self) -> list[WorkerRef]:
        return [WorkerRef("node", member.id, member.incarnation) for member in self._view.members("node")]

    def _split(self, host: str) -> tuple[list[WorkerRef], list[WorkerRef]]:
        """The pool's nodes on `host`, and the others."""
        here = {node.id for node in placed_nodes(self._view) if host and node.host == host and node.state is NodeState.ACTIVE}
        nodes = self._nodes()
        return [node for node in nodes if node.id in here], [node for node in nodes if node.id not in here]


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
