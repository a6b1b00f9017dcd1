"""All nodes' memories together: who holds which leading blocks, and where new ones go.

`placed`: a block's home is its owner by rendezvous hashing, one home each. Else blocks stay where they were computed and where they were
copied to. The index is production's, fed with the same events.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.block import BlockKey
from kvpool.policy.eviction import make_policy
from kvpool.policy.placement import PlacedNode, blocks_per_extent, place
from kvpool.policy.prefix import PrefixIndex
from kvpool.replay.sim.memory import NodeMemory
from kvpool.replay.sim.world import World


class Found(NamedTuple):
    """Leading blocks of one prompt: `near` by node (those that it has itself), `anywhere` that a puller could get.

    `source` is the node that has the longest run, -1 where blocks have homes.
    """

    near: Sequence[int]
    anywhere: int
    source: int


class Store:
    """The pool, or each node's own cache."""

    def __init__(self, world: World, eviction: str, *, placed: bool) -> None:
        self._world = world
        self._placed = placed
        self._index: PrefixIndex[int] = PrefixIndex(holder_keys=1 << 22)
        self.memories = [NodeMemory(node, world, make_policy(eviction), self._index) for node in range(world.nodes)]
        self._nodes = tuple(PlacedNode(id=f"{node:02d}") for node in range(world.nodes))
        self._extent = blocks_per_extent(world.block_tokens)
        self._homes: dict[BlockKey, int] = {}

    def find(self, keys: Sequence[BlockKey]) -> Found:
        """Who holds how much of the chain `keys`."""
        match = self._index.match(keys)
        near = [0] * self._world.nodes
        if self._placed:
            for home in self.homes(keys, 0, match.blocks):
                near[home] += 1
            return Found(near, match.blocks, -1)
        source, longest = -1, 0
        for node, blocks in match.leading().items():
            near[node] = blocks
            if blocks > longest or (blocks == longest and node < source):
                source, longest = node, blocks
        return Found(near, longest, source)

    def parts(self, keys: Sequence[BlockKey], found: Found, first: int, last: int, target: int) -> dict[int, float]:
        """Bytes by source of blocks [first, last) that `target` hasn't got."""
        size = float(self._world.block_tokens * self._world.token_bytes)
        if not self._placed:
            return {found.source: size * (last - first)} if last > first and found.source != target else {}
        parts: dict[int, float] = {}
        for home in self.homes(keys, first, last):
            if home != target:
                parts[home] = parts.get(home, 0.0) + size
        return parts

    def keep(self, keys: Sequence[BlockKey], node: int, now_ns: int, sequence: int) -> dict[int, float]:
        """The chain `keys` is complete on `node`: it goes to its homes, or stays. Bytes to send, by home."""
        if not self._placed:
            self.memories[node].keep(keys, range(len(keys)), now_ns, sequence)
            return {}
        groups: dict[int, list[int]] = {}
        for position, home in enumerate(self.homes(keys, 0, len(keys))):
            groups.setdefault(home, []).append(position)
        size = self._world.block_tokens * self._world.token_bytes
        sent: dict[int, float] = {}
        for home, positions in groups.items():
            new = sum(keys[position] not in self.memories[home] for position in positions)
            self.memories[home].keep(keys, positions, now_ns, sequence)
            if new and home != node:
                sent[home] = float(new * size)
        return sent

    def homes(self, keys: Sequence[BlockKey], first: int, last: int) -> list[int]:
        """The owners of blocks [first, last) of a chain, extent by extent."""
        homes, extent = self._homes, self._extent
        heads = [keys[position - position % extent] for position in range(first, last)]
        unknown = [head for head in dict.fromkeys(heads) if head not in homes]
        if unknown:
            for head, placement in zip(unknown, place(unknown, 1, self._nodes, 1), strict=True):
                homes[head] = int(placement.targets[0])
        return [homes[head] for head in heads]

    def price(self, node: int) -> float:
        """What one more token costs on `node`, or wherever it goes, in tokens to compute again."""
        if self._placed:
            return sum(memory.regret.price for memory in self.memories) / len(self.memories)
        return self.memories[node].regret.price

    def free_tokens(self, node: int) -> int:
        """Room on `node`, or wherever it goes."""
        blocks = sum(m.free for m in self.memories) if self._placed else self.memories[node].free
        return blocks * self._world.block_tokens
