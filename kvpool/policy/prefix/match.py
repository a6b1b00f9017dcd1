"""What an index says about one prompt."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import compress
from typing import Final, Generic, NamedTuple, TypeVar

from kvpool.policy.prefix.states import State, slots_of

H = TypeVar("H", bound=Hashable)
_FEW: Final = 12
_BITS: Final = bytes.maketrans(b"01", b"\0\1")


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

    def __init__(self, runs: list[tuple[int, State]], holders: Sequence[H], slots: Mapping[H, int]) -> None:
        """`runs`: (end, state) of stretches of the prompt, neighbours in different states, none empty. `holders` by their slots."""
        self._runs = runs
        self._holders = holders
        self._slots = slots
        self.blocks = runs[-1][0] if runs else 0

    def leading(self) -> dict[H, int]:
        """How many leading blocks each holder has, on any tier; only those that have the first one."""
        answer: dict[H, int] = {}
        holders, alive, end = self._holders, -1, 0
        for next_end, (dram, gpu, below) in self._runs:
            still = alive & (dram | gpu | below)
            if still != alive:
                gone = alive ^ still
                if end and not gone & (gone - 1):  # one only, as mostly
                    answer[holders[gone.bit_length() - 1]] = end
                elif end:
                    self._name(gone, end, answer)
                alive = still
                if not alive:
                    return answer
            end = next_end
        if end:
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
        counts, start, mine = [0, 0, 0], 0, 1 << slot
        for end, (dram, gpu, below) in self._runs:
            if gpu & mine:
                counts[0] += end - start
            elif dram & mine:
                counts[1] += end - start
            elif below & mine:
                counts[2] += end - start
            else:
                break
            start = end
        return counts[0], counts[1], counts[2]

    def together(self, near: Iterable[H], far: Iterable[H], after: int = 0) -> Reach:
        """The leading blocks behind the first `after` that `near` and `far` have between them: what a worker near the former can load."""
        close, distant = self._set(near), self._set(far)
        places = ((0, close), (1, close), (0, distant), (1, distant), (2, close), (2, distant))
        counts, start = [0] * len(places), after
        for end, state in self._runs:
            if end <= after:
                continue
            place = next((i for i, (tier, some) in enumerate(places) if state[tier] & some), None)
            if place is None:
                break
            counts[place] += end - start
            start = end
        return Reach(start - after, *counts)

    def _set(self, holders: Iterable[H]) -> int:
        some = 0
        for holder in holders:
            if (slot := self._slots.get(holder)) is not None:
                some |= 1 << slot
        return some

    def _name(self, some: int, blocks: int, answer: dict[H, int]) -> None:
        """Say of the holders `some` that they have `blocks`."""
        holders = self._holders
        if some.bit_count() <= _FEW:
            for slot in slots_of(some):
                answer[holders[slot]] = blocks
        else:
            marks = f"{some:b}".encode()[::-1].translate(_BITS)
            answer.update(dict.fromkeys(compress(holders, marks), blocks))
