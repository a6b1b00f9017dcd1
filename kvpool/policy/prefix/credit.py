"""How far a holder is believed: what it was said to hold, against what requests really found there.

An index is told by others, late, and perhaps wrongly. Each request that ran on a holder proves something: of `claimed` leading blocks it
found `found`. A holder that misses what it was credited with loses half of what it was wrong by; one that keeps its word regains an eighth
of what it lacks. So a liar is believed 1/16 after four misses, and needs about twenty kept words to be believed again.
"""

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

H = TypeVar("H", bound=Hashable)

LOSS: Final = 1 / 2
GAIN: Final = 1 / 8


class Credit(Generic[H]):
    """A number from 0 to 1 for each holder, 1 until something else is proved."""

    def __init__(self) -> None:
        self._of: dict[H, float] = {}

    def of(self, holder: H) -> float:
        """How far `holder` is believed."""
        return self._of.get(holder, 1.0)

    def prove(self, holder: H, claimed: int, found: int) -> None:
        """Of `claimed` leading blocks a request found `found`. One block less is forgiven: engines compute a prompt's last token anew."""
        if claimed <= 0:
            return
        kept = 1.0 if found >= max(1, claimed - 1) else max(0, found) / claimed
        credit = self.of(holder)
        self._of[holder] = credit + (LOSS if kept < credit else GAIN) * (kept - credit)

    def forget(self, holder: H) -> None:
        """`holder` is gone."""
        self._of.pop(holder, None)
