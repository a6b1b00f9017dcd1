"""One computation for many who want the same: which blocks are being computed, and by whom. Pure.

Theory. A request that has to compute blocks nobody holds is the *leader* of a flight over their keys. A request whose own missing blocks
begin with keys of a flight need not compute them: it *follows*, which is to wait until the flight is over and then to go on with what there
is. Keys are chained, so what two requests have in common is a leading part, and one key says all about those before it. A leader that
fails, or that nobody wants any more, ends its flight; whoever of its followers asks first then leads, over what is still missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvpool.block import BlockKey

MAX_KEYS = 1 << 20
"""Keys of all flights: 60 MB. A leader beyond that leads nobody."""


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """What `leader` computes: `keys`, which are blocks `first`, `first` + 1... of its chain."""

    leader: str
    priority: int
    first: int
    keys: tuple[BlockKey, ...]
    begun: bool = False
    """Whether a worker is at it; until then the leader stands in line, at its priority."""
    followers: int = 0
    held: int = 0
    """Set at the end: leading blocks of the chain that are there now."""


class Flights:
    """All flights of one router."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._by_key: dict[BlockKey, Flight] = {}

    def __len__(self) -> int:
        return len({id(flight) for flight in self._by_key.values()})

    def find(self, keys: Sequence[BlockKey], held: int, *, priority: int) -> tuple[Flight, int] | None:
        """The flight to follow for a chain `keys` of which `held` leading blocks are there, and how many blocks it will bring; or None.

        A flight that hasn't begun is followed only by those who are no more urgent than its leader.
        """
        if not self._by_key or held >= len(keys):
            return None
        flight = self._by_key.get(keys[held])
        if flight is None or (priority < flight.priority and not flight.begun):
            return None
        end = held
        while end < len(keys) and self._by_key.get(keys[end]) is flight:
            end += 1
        return flight, end - held

    def lead(self, leader: str, keys: Sequence[BlockKey], held: int, *, priority: int = 0) -> Flight:
        """A flight over the blocks of `keys` from `held` on; what others compute already stays theirs."""
        flight = Flight(leader=leader, priority=priority, first=held, keys=tuple(keys[held:]))
        if len(self._by_key) + len(flight.keys) <= self._max_keys:
            for key in flight.keys:
                self._by_key.setdefault(key, flight)
        return flight

    def end(self, flight: Flight, held: int) -> None:
        """The flight is over: `held` leading blocks of its chain are there now. Again: nothing."""
        flight.held = held
        for key in flight.keys:
            if self._by_key.get(key) is flight:
                del self._by_key[key]
