"""Ours: who leaves is whose room is worth least, by what has been learnt about when blocks come back.

Theory. The blocks that one request used last are a *group*, split by kind: the tail (its last block, mostly a partial one that never
recurs), the few before it, the inner ones, and blocks that several conversations share. What happens to a group is learnt by class
(`reuse.py`): kind, turn of the conversation, length of the prompt, time since the turn before, tokens that are new since then; for shared
blocks, how often they were shared, and the length. Once a conversation has gone on, what its earlier prompt alone used is *left*:
another kind, which hardly ever comes back.

    value of a group = index(class, age) x recompute cost / bytes

The index is the chance of a use per second of room taken (Gittins). The cost of a block grows with its depth, as attention does
(`kvpool.policy.price.recompute`, by which the price of memory is reckoned too). Groups
stand in a heap by value, and are ranked again when their age enters another bin and when the model was fitted anew. A priority other
than 50 scales the value: ten points are a factor of two. Expired blocks are removed by whoever owns them.

Tails leave before heads: within a group the deepest is offered first, and a block with resident children is parked until the last of
them is gone, as in `prefix_lru.py`; so a block never outlives the head it needs. A block that has children is never offered.

What it is told is enough: a request shows as a batch of equal time and prompt length, its turn by the tails of earlier prompts that
it contains, resident or remembered. Where `sequence` is unknown the deepest block counts as the tail. Work: O(log groups) a block,
amortised. Memory: per block about what `prefix-lru` takes, besides the model's samples, and 8,192 tails more than blocks.
"""

from collections import OrderedDict
from collections.abc import Generator
from heapq import heappop, heappush
from itertools import islice
from math import log2

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import DEFAULT_PRIORITY, NEVER_NS, Arrival, inserted_twice
from kvpool.policy.eviction.reuse import BINS, EDGES_NS, Class, Name, ReuseHazard, bin_of
from kvpool.policy.price import recompute

TAIL, NEAR, INNER, SHARED, LEFT = range(5)
"""Kinds of groups."""

_TAILS_KEPT = 2  # last blocks of a prompt by which its continuation is recognised
_MORE_TAILS = 8192  # tails remembered beyond one a block
_MAX_BRANCHES = 8  # continuations of one block that count as turns; more are other conversations
_SAME_PROMPT = 0.8  # share of a prompt that must recur to be the same conversation
_FIT_EVERY = 64  # requests
_ADVANCE_EVERY = 16
_POINTS_PER_DOUBLING = 10
_MAX_FAN = 255
_STEP_MEMORY = 100  # steps of the clock
_NEAR_BLOCKS = 4  # a prompt's last ones: what is asked last changes most


class _Request:
    """One batch: what a reader or writer used together."""

    __slots__ = ("groups", "left", "now_ns", "sequence", "turn")

    def __init__(self, now_ns: int, sequence: int) -> None:
        self.now_ns = now_ns
        self.sequence = sequence
        self.turn = 1
        self.groups: list[_Group] = []
        self.left = False


class _Group:
    """Blocks of one request that share a fate. `ready` may be offered, the first first; `parked` have children."""

    __slots__ = ("bytes", "cls", "cost", "parked", "priority", "priority_until_ns", "ready", "request", "shared", "since_ns", "version")

    def __init__(self, request: _Request, priority: int, priority_until_ns: int, shared: bool) -> None:
        self.request = request
        self.priority = priority
        self.priority_until_ns = priority_until_ns
        self.shared = shared
        self.ready: OrderedDict[BlockKey, None] = OrderedDict()
        self.parked: dict[BlockKey, None] = {}
        self.since_ns = request.now_ns
        self.cls: Class | None = None  # None: its request isn't over
        self.version = 0
        self.cost = 0.0
        self.bytes = 0


class _Node:
    __slots__ = ("branches", "depth", "fan", "group", "length", "parent", "span")

    def __init__(self, parent: BlockKey | None, depth: int, length: int, span: int) -> None:
        self.parent = parent
        self.depth = depth
        self.length = length
        self.span = span
        self.fan = 0  # requests of other conversations that used it
        self.branches = 0  # continuations seen
        self.group: _Group | None = None

    @property
    def cost(self) -> float:
        return recompute(1, self.depth)


class ReuseValue:
    """Least valuable first, tails before heads. See the top of this file."""

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._children: dict[BlockKey, list[int]] = {}  # parent: [resident children, depth of the shallowest seen]
        self._hazard = ReuseHazard()
        self._tails: OrderedDict[BlockKey, tuple[int, int, int, int]] = OrderedDict()  # last blocks of prompts: (turn, when, continuations)
        self._groups: dict[int, _Group] = {}  # by serial: ranked ones
        self._rank: list[tuple[float, int, int, int, _Group]] = []  # (value, since, serial, version, group)
        self._due: list[tuple[int, int, int, _Group]] = []  # (when its age enters another bin, serial, version, group)
        self._now_ns = self._serial = self._requests = self._unfitted = 0
        self._span = 512
        self._step_ns = 0.0
        self._begin(0, -1)

    # Events

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`. Raises `LocalError` when the key is resident already."""
        key, parent, depth, length, sequence, priority, until_ns, _ = arrival
        if key in self._nodes:
            raise inserted_twice(key)
        if parent is not None:
            above = self._nodes.get(parent)
            if above is not None and above.depth >= depth:
                parent = None
            else:
                children = self._children.setdefault(parent, [0, depth])
                children[0] += 1
                children[1] = min(children[1], depth)
        waiting = self._children.get(key)
        if waiting is not None and waiting[1] <= depth:
            del self._children[key]
        node = self._nodes[key] = _Node(parent, depth, length, self._span)
        self._used(key, node, now_ns, sequence, None, (priority, until_ns))

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        node = self._nodes.get(key)
        if node is None or node.group is None:
            return
        before = node.group
        self._take_out(key, node, before)
        self._used(key, node, now_ns, sequence, before, (before.priority, before.priority_until_ns))

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        if node.group is not None:
            self._take_out(key, node, node.group)
        children = self._children.get(node.parent) if node.parent is not None else None
        if node.parent is None or children is None:
            return
        children[0] -= 1
        if children[0] == 0:
            del self._children[node.parent]
            self._unpark(node.parent)

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        self._close_request()
        self._rank_due()
        rank, children, nodes = self._rank, self._children, self._nodes
        passed: list[tuple[_Group, BlockKey]] = []
        emptied: list[tuple[float, int, int, int, _Group]] = []
        try:
            while rank:
                entry = rank[0]
                group = entry[4]
                if entry[3] != group.version or not group.ready:
                    heappop(rank)
                    if entry[3] == group.version:
                        emptied.append(entry)
                    continue
                key = next(iter(group.ready))
                if key in children:
                    del group.ready[key]
                    group.parked[key] = None
                    continue
                yield key
                if key in nodes:
                    del group.ready[key]
                    passed.append((group, key))
        finally:
            for group, key in reversed(passed):
                if key in nodes:
                    group.ready[key] = None
                    group.ready.move_to_end(key, last=False)
            for entry in emptied:
                if entry[3] == entry[4].version and entry[4].ready:
                    heappush(rank, entry)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    # Requests: batches of events

    def _begin(self, now_ns: int, sequence: int) -> None:
        self._request = _Request(now_ns, sequence)
        self._batch: dict[tuple[int, int, int, int, bool], _Group] = {}
        self._new_tails: list[BlockKey] = []
        self._continues: _Request | None = None
        self._gap_ns = self._growth = self._deepest = 0
        self._first_touch = True
        self._touching = False
        self._above: tuple[BlockKey | None, int] = (None, 0)  # parent and depth of the block before, to see how long blocks are
        if now_ns > self._now_ns:
            step_ns = now_ns - self._now_ns
            self._step_ns += (step_ns - self._step_ns) / _STEP_MEMORY if self._step_ns else step_ns if self._now_ns else 0
            self._now_ns = now_ns

    def _used(self, key: BlockKey, node: _Node, now_ns: int, sequence: int, before: _Group | None, priority: tuple[int, int]) -> None:
        """The block is used by the request that goes on now, or by a new one."""
        request, depth = self._request, node.depth
        deeper_again = depth > self._deepest > 0 and not self._touching
        if now_ns != request.now_ns or sequence != request.sequence or deeper_again:
            self._close_request()
            self._begin(now_ns, sequence)
            request = self._request
        self._deepest = max(self._deepest, depth)
        self._touching = before is not None
        if self._above[0] == key and self._above[1] > depth:
            self._span = self._above[1] - depth
        self._above = (node.parent, depth)
        self._hazard.used(key, now_ns)
        self._recognise(key, node, request, before)
        from_end = sequence - depth if sequence else 0 if not self._batch and not self._new_tails else NEVER_NS
        if len(self._new_tails) < _TAILS_KEPT and (from_end < _TAILS_KEPT * node.span or (not sequence and len(self._new_tails) < 2)):
            self._new_tails.append(key)
        if node.fan:
            kind = SHARED
        elif from_end < node.span:
            kind = TAIL
        else:
            kind = NEAR if from_end < _NEAR_BLOCKS * node.span else INNER
        name = (kind, node.fan.bit_length(), *priority, before is not None)
        group = self._batch.get(name)
        if group is None:
            group = self._batch[name] = _Group(request, *priority, shared=kind == SHARED)
            request.groups.append(group)
        group.ready[key] = None
        group.cost += node.cost
        group.bytes += node.length
        node.group = group

    def _recognise(self, key: BlockKey, node: _Node, request: _Request, before: _Group | None) -> None:
        """Is this request the next turn of a conversation? It is when it contains the tail of an earlier prompt."""
        if request.turn == 1:
            tail = self._tails.get(key)
            if tail is not None and tail[2] < _MAX_BRANCHES:
                request.turn = tail[0] + 1
                self._gap_ns = max(1, request.now_ns - tail[1])
                self._tails[key] = (tail[0], tail[1], tail[2] + 1, tail[3])
                self._growth = max(1, request.sequence - tail[3])
        if before is None or not self._first_touch:
            return
        self._first_touch = False
        earlier = before.request
        same = bool(earlier.sequence) and node.depth + node.span >= earlier.sequence * _SAME_PROMPT
        if request.turn == 1 and same and node.branches < _MAX_BRANCHES:
            request.turn = earlier.turn + 1
            self._gap_ns = max(1, request.now_ns - earlier.now_ns)
            self._growth = max(1, request.sequence - earlier.sequence)
            if not node.fan:
                self._continues = earlier
        if request.turn > 1:
            node.branches += 1

    def _close_request(self) -> None:
        """The request's events are over: its groups get their classes and their places."""
        if not self._batch:
            return
        request, batch = self._request, self._batch
        request.sequence = request.sequence or self._deepest + 1
        self._leave(self._continues, request.now_ns)
        for (kind, fan, *_, touched), group in batch.items():
            if not group.ready:
                continue
            if touched and request.turn == 1:
                for key in group.ready:
                    node = self._nodes[key]
                    node.fan = min(node.fan + 1, _MAX_FAN)
            group.cls = self._hazard.cls(self._class_of(kind, fan, request))
            self._requests += 1
            chosen = (self._requests * 0x9E3779B1 >> 7) % len(group.ready)
            self._hazard.follow(next(islice(group.ready, chosen, None)), group.since_ns, group.cls)
            self._place(group)
        for key in self._new_tails:
            known = self._tails.pop(key, None)
            self._tails[key] = (request.turn, request.now_ns, known[2] if known else 0, request.sequence)
        while len(self._tails) > _MORE_TAILS + len(self._nodes):
            self._tails.popitem(last=False)
        self._batch, self._new_tails, self._continues = {}, [], None
        self._unfitted += 1
        if self._unfitted % _ADVANCE_EVERY == 0:
            self._hazard.advance(self._now_ns)
        if self._unfitted >= max(_FIT_EVERY, len(self._groups) // 8):
            self._fit()

    def _class_of(self, kind: int, fan: int, request: _Request) -> Name:
        length = _scale(request.sequence, 2)
        if kind == SHARED:
            return (kind, fan, length)
        turn = request.turn if request.turn < 5 else 5 if request.turn < 7 else 6 if request.turn < 11 else 7
        return (kind, turn, length, _scale(self._gap_ns), _scale(self._growth))

    def _leave(self, earlier: _Request | None, now_ns: int) -> None:
        """A conversation has gone on: what its earlier prompt used and this one didn't is left."""
        if earlier is None or earlier.left:
            return
        earlier.left = True
        for group in earlier.groups:
            if group.cls is None or group.shared or not (group.ready or group.parked):
                continue
            group.cls = self._hazard.cls((LEFT,))
            group.since_ns = now_ns
            if group.ready:
                self._hazard.follow(next(iter(group.ready)), now_ns, group.cls)
            self._place(group)

    # The heap

    def _place(self, group: _Group) -> None:
        """Rank the group by its value now."""
        assert group.cls is not None
        number = bin_of(self._now_ns - group.since_ns)
        value = self._hazard.index(group.cls, number) * group.cost / max(1, group.bytes)
        priority = group.priority if self._now_ns < group.priority_until_ns else DEFAULT_PRIORITY
        if priority != DEFAULT_PRIORITY:
            value *= 2 ** ((priority - DEFAULT_PRIORITY) / _POINTS_PER_DOUBLING)
        group.version += 1
        self._serial += 1
        self._groups[id(group)] = group
        heappush(self._rank, (value, group.since_ns, self._serial, group.version, group))
        if number < BINS - 1:
            heappush(self._due, (group.since_ns + EDGES_NS[number], self._serial, group.version, group))

    def _rank_due(self) -> None:
        due = self._due
        while due and due[0][0] <= self._now_ns:
            _, _, version, group = heappop(due)
            if group.version == version and (group.ready or group.parked):
                self._place(group)

    def _fit(self) -> None:
        """Learn from what was counted since, and rank everything anew."""
        self._hazard.refresh(self._unfitted, self._step_ns)
        self._unfitted = 0
        groups = [group for group in self._groups.values() if group.ready or group.parked]
        self._groups, self._rank, self._due = {}, [], []
        for group in groups:
            self._place(group)

    def _take_out(self, key: BlockKey, node: _Node, group: _Group) -> None:
        if key in group.ready:
            del group.ready[key]
        else:
            group.parked.pop(key, None)
        group.cost -= node.cost
        group.bytes -= node.length

    def _unpark(self, key: BlockKey) -> None:
        node = self._nodes.get(key)
        if node is not None and node.group is not None and key in node.group.parked:
            group = node.group
            empty = not group.ready
            del group.parked[key]
            group.ready[key] = None
            group.ready.move_to_end(key, last=False)
            if empty and group.cls is not None:
                self._place(group)


def _scale(size: int, steps: int = 1) -> int:
    """Which size it is, `steps` sizes to a doubling; -9 for none."""
    return round(steps * log2(size)) if size else -9
