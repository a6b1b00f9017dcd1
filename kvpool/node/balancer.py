"""The balancer: keeps each block on the nodes it belongs to, by going round over all that this node holds (`policy/moves.py` is the rule).

A *round* walks over the node's blocks in slices. For each slice it asks the blocks' targets what they have, pushes what they lack, and lets
go of what others hold in full. A round begins when the cluster changes (and the one under way is given up), after a round that left
something to do, when the news have reached everybody, and now and then to repair what went wrong unseen. A round that found nothing to
push makes the node *settled*.

A node without free memory is pushed only what the last change made its own, and that once. Whatever else it lacks it has evicted, and
would evict something else for. Nor is any node given a block twice while the cluster stays as it is, or only much later (`again_s`):
a tenant may be at its quota there.

The walk stays off the event loop's back: a slice is some hundred blocks, and a round that nothing hurries rests between slices four times
as long as they take.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool.block import BlockKey
from kvpool.client.links import Links
from kvpool.client.sources import NodeRef
from kvpool.clock import Clock
from kvpool.cluster.config import ClusterConfig
from kvpool.errors import ClosedError, ConfigError, RemoteError
from kvpool.node.handler import NodeHandler
from kvpool.node.inventory import Held, Inventory
from kvpool.node.near import OWNER as NEAR_OWNER
from kvpool.node.peers import Peers
from kvpool.node.pushing import Pusher
from kvpool.node.standing import Standing
from kvpool.node.tiers import OWNER as TIERS_OWNER
from kvpool.node.tiers import Tiers
from kvpool.policy.moves import Verdict, judge
from kvpool.policy.placement import NodeState, PlacedNode, place
from kvpool.pool import PoolState
from kvpool.request.admin import Balance
from kvpool.request.pool import NEAR
from kvpool.units import SECOND
from kvpool.wire.fence import NodeIdentity

log = logging.getLogger(__name__)

_ASK_S = 2.0
_LOOK_S = 0.1
_RETRY_S = 0.5
_MAX_RETRY_S = 30.0
_REST = 4
_QUIET_S = 1.0
_MAX_GIVEN = 1 << 17
_OWN_WRITERS = {NEAR_OWNER, TIERS_OWNER}
_ROOM_PERCENT = 5
"""A node with less free memory than this is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """`repair_s`: between rounds when nothing happens. `news_s`: within so long a change of the cluster is known to everybody. `again_s`:
    so long a node isn't given again what it was given and lacks."""

    repair_s: float = 60.0
    again_s: float = 600.0
    news_s: float = 10.0


class Situation(NamedTuple):
    """What a round goes by; another one ends it."""

    lives: tuple[NodeIdentity, ...]
    placed: tuple[PlacedNode, ...]
    config: ClusterConfig


@dataclass(slots=True)
class _Round:
    """What a round has found so far.

    `left`: blocks per node that are not known to be there ("": nobody to take them); `adrift`: blocks of which nobody can say where they
    belong; `full`: nodes without free memory. `before`: how things were when this node was last settled, None in later rounds than the
    first after a change. `sure`: the news were old when it began; `early`: somebody might still have written then.
    """

    situation: Situation
    refs: dict[str, NodeRef]
    states: dict[str, NodeState]
    before: Situation | None
    sure: bool
    early: bool
    full: set[str] = field(default_factory=set)
    blocks: int = 0
    nbytes: int = 0
    safe_blocks: int = 0
    safe_bytes: int = 0
    left: Counter[str] = field(default_factory=Counter)
    adrift: int = 0


class Balancer:
    """The balancer of one node. `start()`, `await stop()`; all calls on the event loop."""

    def __init__(
        self,
        me: NodeIdentity,
        handler: NodeHandler,
        pool: PoolState,
        tiers: Tiers,
        inventory: Inventory,
        pusher: Pusher,
        clock: Clock,
        links: Links,
        peers: Peers | None,
        connected: Callable[[], bool],
        settings: BalanceSettings,
    ) -> None:
        self.identity = me
        """Who answers peers."""
        self._me = me.node_id
        self._standing: Standing | None = None
        self._handler = handler
        self._pool = pool
        self._tiers = tiers
        self._inventory = inventory
        self._pusher = pusher
        self._clock = clock
        self._links = links
        self._peers = peers
        self._connected = connected
        self._settings = settings
        self._rate: int | None = None
        self._told_ns: int | None = None
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._now: _Round | None = None
        self._last: _Round | None = None
        self._settled: Situation | None = None
        self._since: tuple[Situation, int] | None = None
        self._retry_s = _RETRY_S
        self._given: dict[tuple[str, BlockKey], None] = {}
        self._given_ns = 0
        self.counters = dict.fromkeys(("rounds", "pushed_extents", "dropped"), 0)

    @property
    def state(self) -> NodeState:
        """This node's state; joining until it has joined."""
        return NodeState.JOINING if self._standing is None else self._standing.state

    @property
    def closed(self) -> bool:
        """Whether this node takes no more writes: it drains, and everybody has had time to know, for the store has told so for a while.

        Nobody learns of a drain while the store is away, so such a drain goes on until it is back.
        """
        if self.state is NodeState.DRAINING and not self._closed:
            self._note_told(self._links.nodes())
        return self._closed

    def start(self, standing: Standing) -> None:
        """The node has joined: begin to go round."""
        self._standing = standing
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; a batch that is under way is waited for."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def drain(self, *, cancel: bool, bytes_per_s: int) -> None:
        """Move everything to others, or (`cancel`) take part as before. Raises `ConfigError` before the node has joined."""
        if self._standing is None:
            raise ConfigError("this node hasn't joined its cluster yet; try again in a moment")
        self._rate = bytes_per_s or None
        self._pace(self._links.config)
        if not cancel:
            self._standing.change(NodeState.DRAINING)
        elif self._standing.state is NodeState.DRAINING:
            self._told_ns, self._closed = None, False
            self._standing.change(NodeState.ACTIVE)

    def left_for(self, node: NodeIdentity) -> int | None:
        """See `PeerHandler.left_for`."""
        if self._last is None or node not in self._last.situation.lives:
            return None
        return self._last.left[node.node_id]

    def heads(self, keys: Sequence[bytes], extent_tokens: int) -> list[bytes]:
        """See `PeerHandler.heads`. Nodes that go by different extents tell each other nothing."""
        if extent_tokens != self._links.config.extent_tokens:
            return [b""] * len(keys)
        return [self._inventory.head(BlockKey(key), extent_tokens) or b"" for key in keys]

    def report(self) -> Balance:
        """How far this node is: by the round under way, or the last one once there is nothing left to do."""
        last = self._last
        settled = last is not None and last.situation == self._look() and self._clean(last)
        if self.state is NodeState.DRAINING:
            settled = settled and last is not None and not last.early
        shown = last if settled else self._now or last
        counters = {**self.counters, **self._pusher.counters, "adrift": 0 if last is None else last.adrift}
        if shown is None:
            return Balance(state=self.state, settled=False, counters=counters)
        return Balance(
            state=self.state,
            settled=settled,
            rounds=self.counters["rounds"],
            blocks=shown.blocks,
            block_bytes=shown.nbytes,
            safe_blocks=shown.safe_blocks,
            safe_bytes=shown.safe_bytes,
            counters=counters,
        )

    # Rounds

    async def _run(self) -> None:
        while True:
            try:
                situation = self._look()
                await self._rest(situation, await self._turn(situation))
            except Exception:
                log.exception("a round over this node's blocks failed")
                await asyncio.sleep(_RETRY_S)

    async def _turn(self, situation: Situation) -> float:
        """One round; how long to rest afterwards."""
        before, pushed = self._last, self._pusher.counters["pushed"]
        first = before is None or before.situation != situation
        if first or self._clock.now_ns() - self._given_ns > self._settings.again_s * SECOND:
            self._given.clear()
            self._given_ns = self._clock.now_ns()
        done = await self._round(situation, first=first, hurried=first or before is None or not self._clean(before))
        if done is None:
            return 0.0
        self._last = done
        self.counters["rounds"] += 1
        if self._clean(done):
            self._retry_s, self._settled = _RETRY_S, situation
            draining = self.state is NodeState.DRAINING
            return _RETRY_S if draining else self._settings.repair_s if done.sure else self._settings.news_s
        if first or self._pusher.counters["pushed"] > pushed:
            self._retry_s = _RETRY_S
            return 0.0
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)  # nothing moved: whoever is in the way needs time
        return self._retry_s

    async def _rest(self, situation: Situation, wait_s: float) -> None:
        """Until `wait_s` are over or the cluster is no longer as it was."""
        until_ns = self._clock.now_ns() + int(wait_s * SECOND)
        await asyncio.sleep(0)
        while (left_ns := until_ns - self._clock.now_ns()) > 0 and self._look() == situation:  # noqa: ASYNC110 - the view has no event
            await asyncio.sleep(min(_LOOK_S, left_ns / SECOND))

    async def _round(self, situation: Situation, *, first: bool, hurried: bool) -> _Round | None:
        """Go over everything; None when the cluster changed meanwhile."""
        refs = {ref.node_id: ref for ref in self._links.nodes()}
        states = {node.id: node.state for node in situation.placed}
        sure = self._age_ns(situation) >= self._settings.news_s * SECOND and self._connected()
        early = not self.closed or not self._pool.writers() <= _OWN_WRITERS
        now = _Round(situation, refs, states, self._settled if first else None, sure, early)
        self._now = now
        try:
            self._pace(situation.config)
            now.full = await self._full(now)
            async for held in self._inventory.slices(situation.config.extent_tokens):
                if self._look() != situation:
                    return None
                began_ns = self._clock.now_ns()
                if held:
                    await self._slice(now, await self._with_heads(situation.config.extent_tokens, held))
                await asyncio.sleep(0 if hurried else _REST * (self._clock.now_ns() - began_ns) / SECOND)
        finally:
            self._now = None
        return now

    async def _with_heads(self, extent_tokens: int, held: Sequence[Held]) -> Sequence[Held]:
        """`held`, with what others know of the extents of blocks whose chain is broken here."""
        lost = [one.key for one in held if one.head is None]
        if self._peers is None or not lost:
            return held
        gaps = self._inventory.gaps(lost)
        told = await self._peers.heads(list(dict.fromkeys(gaps.values())), extent_tokens)
        heads = {key: told[gap] for key, gap in gaps.items() if gap in told}
        self._inventory.learn(heads)
        return [one._replace(head=heads[one.key]) if one.key in heads else one for one in held]

    async def _slice(self, now: _Round, held: Sequence[Held]) -> None:
        """Ask, judge, push, let go."""
        targets = await self._targets(now.situation, held)
        former = await self._targets(now.before, held) if now.before is not None and now.full else targets
        self._handler.adopt([one.key for one in held if one.near and self._me in targets[one.key]])
        own = [one for one in held if not one.near or self._me in targets[one.key]]
        wanted: dict[str, list[BlockKey]] = {}
        for one in own:
            for target in targets[one.key]:
                if target != self._me:
                    wanted.setdefault(target, []).append(one.key)
        said = dict(zip(wanted, await asyncio.gather(*(self._ask(now, node, keys) for node, keys in wanted.items())), strict=True))
        push: dict[str, list[Held]] = {}
        drop: list[BlockKey] = []
        for one in own:
            declined = {
                target
                for target in targets[one.key]
                if (target, one.key) in self._given or (target in now.full and target in former[one.key])
            }
            verdict = self._judge(now, one, targets[one.key], said, declined)
            for target in verdict.push:
                if target not in declined:
                    push.setdefault(target, []).append(one)
            if verdict.drop:
                drop.append(one.key)
        await self._let_go(drop)
        for target, blocks in push.items():
            await self._push(now, target, blocks)

    async def _targets(self, situation: Situation, held: Sequence[Held]) -> dict[BlockKey, tuple[str, ...]]:
        """Who should hold each block; nobody, where that can't be told."""
        config = situation.config
        namespaces = await self._inventory.namespaces(held) if config.namespace_copies else {}
        heads: dict[int, dict[BlockKey, None]] = {}
        for head in {one.head: None for one in held if one.head is not None}:
            if head in namespaces:
                heads.setdefault(config.copies_of(namespaces[head]), {})[head] = None
            elif not config.namespace_copies:
                heads.setdefault(config.copies, {})[head] = None
        placed: dict[BlockKey | None, tuple[str, ...]] = {}
        for copies, some in heads.items():
            placements = place(list(some), 1, situation.placed, copies)
            placed.update((head, placement.targets) for head, placement in zip(some, placements, strict=True))
        return {one.key: placed.get(one.head, ()) for one in held}

    def _judge(
        self, now: _Round, one: Held, targets: Sequence[str], said: Mapping[str, Mapping[BlockKey, bool]], declined: Collection[str]
    ) -> Verdict:
        """The rule's verdict on a block, counted. What is `declined` by a node that lacks it is nothing left to do."""

        def holds(target: str) -> bool | None:
            return said[target].get(one.key)

        verdict = judge(self._me, targets, now.states, holds, sure=now.sure)
        now.blocks += 1
        now.nbytes += one.length
        if verdict.safe:
            now.safe_blocks += 1
            now.safe_bytes += one.length
        if one.head is None:
            now.adrift += 1
        elif not targets:
            now.left[""] += 1
        for target in targets:
            if target != self._me and not holds(target) and not (holds(target) is False and target in declined):
                now.left[target] += 1
        return verdict

    async def _full(self, now: _Round) -> set[str]:
        """Who has hardly any free memory."""

        async def room(ref: NodeRef) -> bool:
            try:
                books = await (await self._links.link(ref, _ASK_S)).rpc.describe(_ASK_S)
            except (RemoteError, ClosedError) as error:
                log.warning("node %s doesn't say how full it is: %s", ref.node_id[:8], error)
                return True
            return 100 * books.free_bytes >= _ROOM_PERCENT * books.capacity_bytes

        others = [ref for node_id, ref in now.refs.items() if node_id != self._me and not self._links.resting(ref)]
        answers = await asyncio.gather(*map(room, others))
        return {ref.node_id for ref, roomy in zip(others, answers, strict=True) if not roomy}

    async def _ask(self, now: _Round, node_id: str, keys: list[BlockKey]) -> dict[BlockKey, bool]:
        """What a node says it has of `keys`, near copies not counted; empty when it can't be asked."""
        ref = now.refs[node_id]
        if self._links.resting(ref):
            return {}
        try:
            link = await self._links.link(ref, _ASK_S)
            present = await link.rpc.lookup(keys, _ASK_S)
        except (RemoteError, ClosedError) as error:
            log.warning("node %s can't be asked what it has: %s", node_id[:8], error)
            await self._links.failed(ref)
            return {}
        return {key: there not in (0, NEAR) for key, there in zip(keys, present, strict=True)}

    async def _push(self, now: _Round, target: str, blocks: Sequence[Held]) -> None:
        ref = now.refs[target]
        try:
            sent = await self._pusher.push(ref, [one.key for one in blocks])
        except (RemoteError, ClosedError) as error:
            log.warning("pushing %d blocks to node %s: %s", len(blocks), target[:8], error)
            await self._links.failed(ref)
            return
        if len(self._given) > _MAX_GIVEN:
            self._given.clear()
        self._given.update(dict.fromkeys((target, key) for key in sent))
        self.counters["pushed_extents"] += len({one.head for one in blocks if one.key in sent and one.head == one.key})

    async def _let_go(self, keys: Sequence[BlockKey]) -> None:
        """Blocks that others hold in full; an operator's pin keeps them all the same."""
        going = [key for key in keys if (view := self._pool.view(key)) is None or not view.pins]
        for key in going:
            self._pool.discard(key)
        if going:
            await self._tiers.remove(going)
        self.counters["dropped"] += len(going)

    def _pace(self, config: ClusterConfig) -> None:
        self._pusher.bucket.change(self._rate or config.rebalance_bytes_per_s, self._clock.now_ns())

    # Looking

    def _look(self) -> Situation:
        refs = self._links.nodes()
        if self.state is NodeState.DRAINING:
            self._note_told(refs)
        lives = tuple(NodeIdentity(ref.node_id, ref.incarnation) for ref in refs)
        placed = tuple(
            ref.placed._replace(state=self.state) if ref.node_id == self._me and self._behind(ref) else ref.placed for ref in refs
        )
        return Situation(lives, placed, self._links.config)

    def _note_told(self, refs: Sequence[NodeRef]) -> None:
        """Notice since when the store, which answers, says that this node drains."""
        now_ns = self._clock.now_ns()
        told = self._connected() and any(ref.node_id == self._me and not self._behind(ref) for ref in refs)
        self._told_ns = (self._told_ns or now_ns) if told else None
        if not self._closed and self._told_ns is not None and now_ns - self._told_ns >= _QUIET_S * SECOND:
            self._closed = True
            self._given.clear()  # who didn't know may have let go of what it was given: for this node, the owner

    def _behind(self, ref: NodeRef) -> bool:
        """Whether the view tells of a state of this node that is over."""
        return ref.placed.state not in (self.state, NodeState.QUARANTINED)

    def _age_ns(self, situation: Situation) -> int:
        """How long the cluster has been as it is."""
        now_ns = self._clock.now_ns()
        if self._since is None or self._since[0] != situation:
            self._since = situation, now_ns
        return now_ns - self._since[1]

    @staticmethod
    def _clean(done: _Round) -> bool:
        return not +done.left
