"""Least recently used over chains: tails leave before heads.

A block is useful only to a reader who has all of its ancestors, so a head is
worth at least as much as its tail: a block is offered only while no resident child needs it. The mechanism is one queue,
oldest first, and a count of resident children per key:

* a block with children that reaches the front is *parked* (taken out of the queue), because it can't go before them;
* when its last child leaves, a parked block returns to the *front*: it was the oldest when it was parked, so whatever is
  queued now is younger;
* a touch puts a block, queued or parked, at the young end.

Each park is paid for by the insert or touch that queued the block, so every operation is O(1) amortised. Children are counted
by key, so it doesn't matter whether a parent was there before its child or comes (back) later. An edge counts only where the
depth grows along it: keys are hashes and can't form a circle, but a confused writer's claims could, and blocks in a
circle would never be offered.
"""

from collections import OrderedDict
from collections.abc import Generator

from kvpool.block import BlockKey
from kvpool.policy.eviction.contract import Arrival, inserted_twice


class PrefixLru:
    """Least recently used first, tails before heads. See the top of this file."""

    __slots__ = ("_children", "_nodes", "_queue")

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, tuple[BlockKey | None, int]] = {}  # resident: (parent, depth)
        self._children: dict[BlockKey, list[int]] = {}  # parent: [resident children, depth of the shallowest seen]
        self._queue: OrderedDict[BlockKey, None] = OrderedDict()  # oldest first; resident and absent here = parked

    def inserted(self, arrival: Arrival, now_ns: int) -> None:
        """See `EvictionPolicy.inserted`."""
        key, parent, depth = arrival[:3]
        nodes, counts = self._nodes, self._children
        if key in nodes:
            raise inserted_twice(key)
        if parent is not None:
            above = nodes.get(parent)
            if above is not None and above[1] >= depth:
                parent = None
            else:
                children = counts.get(parent)
                if children is None:
                    counts[parent] = [1, depth]
                else:
                    children[0] += 1
                    if depth < children[1]:
                        children[1] = depth
        nodes[key] = (parent, depth)
        self._queue[key] = None
        waiting = counts.get(key)
        if waiting is not None and waiting[1] <= depth:
            del counts[key]

    def touched(self, key: BlockKey, now_ns: int, sequence: int = 0) -> None:
        """See `EvictionPolicy.touched`."""
        try:
            self._queue.move_to_end(key)
        except KeyError:
            if key in self._nodes:
                self._queue[key] = None

    def removed(self, key: BlockKey) -> None:
        """See `EvictionPolicy.removed`."""
        node = self._nodes.pop(key, None)
        if node is None:
            return
        self._queue.pop(key, None)
        parent = node[0]
        children = self._children.get(parent) if parent is not None else None
        if parent is None or children is None:
            return
        children[0] -= 1
        if children[0] == 0:
            del self._children[parent]
            if parent in self._nodes and parent not in self._queue:
                self._to_front(parent)

    def victims(self) -> Generator[BlockKey, None, None]:
        """See `EvictionPolicy.victims`."""
        queue, children, nodes = self._queue, self._children, self._nodes
        passed_over: list[BlockKey] = []
        try:
            while queue:
                key = next(iter(queue))
                if key in children:
                    del queue[key]
                    continue
                yield key
                if key in nodes:
                    queue.pop(key, None)
                    passed_over.append(key)
        finally:
            for key in reversed(passed_over):
                if key in nodes:
                    self._to_front(key)

    def _to_front(self, key: BlockKey) -> None:
        self._queue[key] = None
        self._queue.move_to_end(key, last=False)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)
