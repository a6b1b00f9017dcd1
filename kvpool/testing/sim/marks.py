"""Named situations that a run should have been in: a checker that never sees the dangerous moment proves nothing.

A world counts each mark it reaches. Over the fixed budget of seeds every mark must be reached (`tests/sim`).
"""

from typing import Final

MARKS: Final = (
    "block carved out of a slab",
    "block evicted",
    "block expired",
    "block fetched from below",
    "block left while it was held",
    "block read without asking",
    "block written down",
    "board changed under a reader",
    "call answered EXISTS",
    "call answered NO_SPACE",
    "call answered by a stranger refused",
    "call delivered twice",
    "call lost",
    "carve after lease end",
    "carve refused a block",
    "clock of the wall jumped back",
    "commit after lease end",
    "commit repeated",
    "completion after restart dropped",
    "damaged block came back from below",
    "damaged block dropped on suspicion",
    "damaged frame refused by a reader",
    "discarded while leased",
    "fence kept a zombie from others",
    "flush outlived its lease",
    "lease at its limit refused",
    "lease renewed",
    "lease ran out",
    "pin hard held a block in eviction",
    "pin ran out",
    "pin refused at its share",
    "pool filled and read back",
    "power lost",
    "quota made a tenant evict its own",
    "quota refused",
    "read outlived its lease",
    "reader saw a suspect that was none",
    "relocated blocks",
    "restart with leases outstanding",
    "room had to wait for a flush",
    "slab refused",
    "soft pin outlived others",
    "tier below refused a block",
    "ttl passed under a reader",
    "writer crashed with a reservation",
    "writer stopped and came back a zombie",
    "zombie scribbled over reused bytes",
)
"""Situations of the pool, its clients and the tier below."""

DISK_MARKS: Final = (
    "died inside the tier below",
    "log reclaimed a segment",
    "restart adopted what was written down",
    "restart on a disk that lied",
    "tier below came back",
    "tier below out of order",
)
"""Situations of a tier on a disk."""


class Coverage:
    """How often each mark was reached."""

    __slots__ = ("counts",)

    def __init__(self, marks: tuple[str, ...] = (*MARKS, *DISK_MARKS)) -> None:
        self.counts: dict[str, int] = dict.fromkeys(marks, 0)

    def hit(self, mark: str) -> None:
        """The world is in the situation `mark`, one of the above."""
        self.counts[mark] += 1

    def add(self, other: dict[str, int]) -> None:
        """Count another world's marks too."""
        for mark, count in other.items():
            self.counts[mark] += count

    def missing(self) -> list[str]:
        """Marks never reached."""
        return [mark for mark, count in self.counts.items() if not count]
