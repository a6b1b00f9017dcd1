"""What an index says about one prompt."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Final, Generic, NamedTuple, TypeVar

from kvpool.policy.prefix.lanes import bit_of, holders_of, lane, ones, slots_of
from kvpool.request.events import BELOW, BESIDE, DRAM

H = TypeVar("H", bound=Hashable)
_FEW: Final = 12


class Reach(NamedTuple):
    """Leading blocks that some holders have together, `near_*` those that near ones have. Each is counted once, in the first of these that
    has it."""

    blocks: int
    near_dram: int
    near_gpu: int
    far_dram: int
    far_gpu: int
    near_below: int
    far_below: int


class Match(Generic[H]):
    """The leading blocks of one prompt, who holds them and on which tier. Of the moment: not to be kept over a change of the index.

    `blocks` is the number of leading blocks that somebody holds, each of them perhaps another.
    """

    __slots__ = ("_holders", "_runs", "_slots", "blocks")

    def __init__(self, runs: list[tuple[int, int]], holders: Sequence[H], slots: Mapping[H, int]) -> None:
        """`runs`: (end, state) of stretches of the prompt, neighbours in different states, none empty. `holders` by their slots."""
        self._runs = runs
        self._holders = holders
        self._slots = slots
        self.blocks = runs[-1][0] if runs else 0

    def leading(self) -> dict[H, int]:
        """How many leading blocks each holder has, on any tier; only those that have the first one."""
        answer: dict[H, int] = {}
        if not self._runs:
            return answer
        unit = ones(len(self._holders))
        alive, end = holders_of(self._runs[0][1], unit), 0
        for next_end, state in self._runs:
            still = alive & holders_of(state, unit)
            if still != alive:
                self._name(alive ^ still, end, answer)
                alive = still
                if not alive:
                    break
            end = next_end
        self._name(alive, end, answer)
        return answer

    def of(self, holder: H) -> int:
        """How many leading blocks `holder` has, on any tier."""
        return sum(self.tiers(holder))

    def tiers(self, holder: H) -> tuple[int, int, int]:
        """The leading blocks of `holder` by tier: GPU, DRAM, below. A block on several counts on the first of them."""
        slot = self._slots.get(holder)
        if slot is None:
            return 0, 0, 0
        counts, start, shift = [0, 0, 0], 0, 8 * slot
        for end, state in self._runs:
            bits = state >> shift & 7
            if not bits:
                break
            counts[0 if bits & 2 else 1 if bits & 1 else 2] += end - start
            start = end
        return counts[0], counts[1], counts[2]

    def together(self, near: Iterable[H], far: Iterable[H], after: int = 0) -> Reach:
        """The leading blocks behind the first `after` that `near` and `far` have between them: what a worker near the former can load."""
        close, all_far = self._lanes(near), self._lanes(far)
        dram, gpu, below = bit_of(DRAM), bit_of(BESIDE), bit_of(BELOW)
        places = [close * dram, close * gpu, all_far * dram, all_far * gpu, close * below, all_far * below]
        counts, start = [0] * len(places), after
        for end, state in self._runs:
            if end <= after:
                continue
            place = next((i for i, mask in enumerate(places) if state & mask), None)
            if place is None:
                break
            counts[place] += end - start
            start = end
        return Reach(start - after, *counts)

    def _lanes(self, holders: Iterable[H]) -> int:
        lanes = 0
        for holder in holders:
            if (slot := self._slots.get(holder)) is not None:
                lanes |= lane(slot, 1)
        return lanes

    def _name(self, marks: int, blocks: int, answer: dict[H, int]) -> None:
        """Say of the holders marked in `marks` that they have `blocks`."""
        holders = self._holders
        if marks.bit_count() <= _FEW:
            for slot in slots_of(marks):
                answer[holders[slot]] = blocks
        else:
            answer.update(dict.fromkeys(compress(holders, marks.to_bytes(len(holders), "little")), blocks))
