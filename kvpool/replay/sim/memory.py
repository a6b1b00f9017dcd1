"""One node's host memory as a cache of blocks: production's eviction policy decides who leaves, production's index is told.

As in `PoolState`: blocks of one request come and are touched tails first, parents of what comes don't leave for it, and what doesn't fit
is left outside, tails first.
"""

from collections.abc import Sequence
from contextlib import closing

from kvpool.block import BlockKey
from kvpool.policy.eviction import Arrival, EvictionPolicy
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.price import Regret, recompute
from kvpool.replay.sim.world import World
from kvpool.request.events import DRAM


class NodeMemory:
    """The memory of `node`. Its price is what it has lost by what left."""

    def __init__(self, node: int, world: World, policy: EvictionPolicy, index: PrefixIndex[int]) -> None:
        self._node = node
        self._world = world
        self._policy = policy
        self._index = index
        self._held: dict[BlockKey, int] = {}  # where in its chain
        self.regret = Regret()

    @property
    def free(self) -> int:
        """Blocks for which there is room."""
        return self._world.node_blocks - len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, keys: Sequence[BlockKey], positions: Sequence[int], now_ns: int, sequence: int) -> None:
        """Have the blocks at `positions` (ascending) of the chain `keys`: touch what is here, take in the rest."""
        held, policy, new = self._held, self._policy, list[int]()
        for position in reversed(positions):
            key = keys[position]
            if key in held:
                policy.touched(key, now_ns, sequence)
            else:
                new.append(position)
        if not new:
            return
        lacking = len(held) + len(new) - self._world.node_blocks
        if lacking > 0:
            lacking -= self._make_room(lacking, {keys[position - 1] for position in new if position})
            new = new[max(0, lacking) :]
        size = self._world.block_tokens
        for position in new:
            key = keys[position]
            parent = keys[position - 1] if position else None
            self.regret.wanted(key)
            policy.inserted(Arrival(key, parent, position * size, size * self._world.token_bytes, sequence), now_ns)
            held[key] = position
        self._tell(keys, new)

    def _make_room(self, lacking: int, parents: set[BlockKey]) -> int:
        gone: list[BlockKey] = []
        size = self._world.block_tokens
        with closing(self._policy.victims()) as victims:
            for victim in victims:
                if victim not in parents:
                    self._policy.removed(victim)
                    depth = self._held.pop(victim) * size
                    self.regret.left(victim, size, recompute(size, depth))
                    gone.append(victim)
                    if len(gone) == lacking:
                        break
        self._index.removed(self._node, gone)
        return len(gone)

    def _tell(self, keys: Sequence[BlockKey], new: Sequence[int]) -> None:
        """Tell the index of runs of neighbours; `new` are positions, descending."""
        run: list[int] = []
        for position in reversed(new):
            if run and position != run[-1] + 1:
                self._stored(keys, run)
                run = []
            run.append(position)
        if run:
            self._stored(keys, run)

    def _stored(self, keys: Sequence[BlockKey], run: Sequence[int]) -> None:
        first = run[0]
        self._index.stored(self._node, keys[first : run[-1] + 1], DRAM, parent=keys[first - 1] if first else None)
