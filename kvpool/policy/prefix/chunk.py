"""A stretch of a chain, and who holds which part of it.

Theory. A chunk has up to `CHUNK_KEYS` consecutive keys of one chain. Holders mostly hold long stretches of a chain, so who holds what is
kept as runs: `states[i]` (see states.py) is that of the keys from `ends[i - 1]` (0 for the first) up to `ends[i]`. Neighbours differ.

A key names all before it, so two lists of keys of chains that agree at one place agree everywhere before it. One comparison therefore
says whether a whole chunk is part of a prompt, and a binary search says where they part.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from kvpool.block import BlockKey
from kvpool.policy.prefix.states import NOBODY, State

CHUNK_KEYS: Final = 128


class Chunk:
    """Consecutive keys of one chain, compared by identity. `parent`: under which key the index finds it as what follows."""

    __slots__ = ("ends", "keys", "parent", "states")

    def __init__(self, keys: list[BlockKey], state: State) -> None:
        self.keys = keys
        self.ends = [len(keys)]
        self.states = [state]
        self.parent: BlockKey | None = None

    def find(self, key: BlockKey) -> int:
        """Where `key`, which is one of this chunk's, stands."""
        keys = self.keys
        if keys[0] == key:
            return 0
        return len(keys) - 1 if keys[-1] == key else keys.index(key)

    def common(self, start: int, keys: Sequence[BlockKey], position: int) -> int:
        """How many keys from `start` on are those of the chain `keys` from `position` on; the first one is known to be."""
        mine = self.keys
        size = min(len(mine) - start, len(keys) - position)
        if mine[start + size - 1] == keys[position + size - 1]:
            return size
        low, high = 1, size - 1  # the first `low` agree, those from `high` on don't
        while low < high:
            middle = (low + high + 1) // 2
            if mine[start + middle - 1] == keys[position + middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def along(self, start: int, keys: Sequence[BlockKey], position: int, step: int) -> int:
        """How many `keys` from `position` on are those from `start` on, up (`step` 1) or down (-1). At least 1. Any keys, no chain."""
        mine = self.keys
        most = min(len(keys) - position, len(mine) - start if step > 0 else start + 1)
        size = 1
        while size < most and mine[start + step * size] == keys[position + size]:
            size += 1
        return size

    def append(self, keys: Sequence[BlockKey], state: State) -> None:
        """`keys` follow, in `state`."""
        self.keys += keys
        if self.states[-1] == state:
            self.ends[-1] = len(self.keys)
        else:
            self.ends.append(len(self.keys))
            self.states.append(state)

    def follow(self, after: "Chunk") -> None:
        """Become this and then `after`."""
        size, runs = len(self.keys), len(self.ends)
        self.keys += after.keys
        self.ends += [size + end for end in after.ends]
        self.states += after.states
        self._join(runs, runs + 1)

    def precede(self, before: "Chunk") -> None:
        """Become `before` and then this."""
        size, runs = len(before.keys), len(before.ends)
        self.keys[:0] = before.keys
        self.ends[:] = before.ends + [size + end for end in self.ends]
        self.states[:0] = before.states
        self._join(runs, runs + 1)

    def holders(self) -> int:
        """Everybody who holds any of it."""
        union = 0
        for dram, gpu, below in self.states:
            union |= dram | gpu | below
        return union

    def change(self, low: int, high: int, mine: int, clear: State, put: State) -> int:
        """Take the sets `clear` from, then add the sets `put` to, the states of keys [low, high). Both are of the one holder in `mine`.

        Returns by how many keys more (or less) that holder has any.
        """
        first, last = self._cut(low), self._cut(high)
        states, gained, at = self.states, 0, low
        take0, take1, take2 = ~clear[0], ~clear[1], ~clear[2]
        put0, put1, put2 = put
        for i in range(first, last):
            dram, gpu, below = states[i]
            now = new0, new1, new2 = dram & take0 | put0, gpu & take1 | put1, below & take2 | put2
            gained += (self.ends[i] - at) * (bool((new0 | new1 | new2) & mine) - bool((dram | gpu | below) & mine))
            states[i] = now
            at = self.ends[i]
        self._join(max(first, 1), min(last + 1, len(states)))
        return gained

    def trim(self) -> list[BlockKey]:
        """Drop the keys at the end that nobody holds and return them; all of them when the chunk has become useless."""
        if self.states[-1] != NOBODY:
            return []
        keep = self.ends[-2] if len(self.ends) > 1 else 0
        gone, self.keys = self.keys[keep:], self.keys[:keep]
        self.ends.pop()
        self.states.pop()
        return gone

    def _cut(self, at: int) -> int:
        """Make a run begin at `at`; its number."""
        i = bisect_left(self.ends, at)
        if at == 0:
            return 0
        if self.ends[i] != at:
            self.ends.insert(i, at)
            self.states.insert(i, self.states[i])
        return i + 1

    def _join(self, first: int, last: int) -> None:
        """Make one run of neighbours that are in the same state, from that before number `first` to that before number `last`."""
        for i in range(last - 1, first - 1, -1):
            if self.states[i] == self.states[i - 1]:
                del self.states[i], self.ends[i - 1]

    def run_at(self, position: int) -> int:
        """The number of the run that the key at `position` is in."""
        return bisect_right(self.ends, position)

    def tail_of(self, mine: int, count: int) -> int:
        """From where on `count` keys, the last ones, are held by the holder in `mine`; 0 if no more than that are."""
        for i in range(len(self.ends) - 1, -1, -1):
            dram, gpu, below = self.states[i]
            if (dram | gpu | below) & mine:
                start = self.ends[i - 1] if i else 0
                count -= self.ends[i] - start
                if count <= 0:
                    return start - count
        return 0
