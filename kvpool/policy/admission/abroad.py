"""Flights of other routers, as they told last. Pure; time is an argument.

Theory. A router tells the others of its flights (`single.py`) as soon as one begins or ends, and again with each report. A request whose
missing blocks begin with those of a flight elsewhere follows that one. Two routers that begin the same flight in the same moment hear of
each other's a moment later; then a flight that a worker is at goes before one that waits, and of two that wait that of the router with the
lesser name: all judge alike, so one of the two goes on. What is told counts until it is `MAX_AGE_NS` old or its router is lost; so a router
that died ends its flights, and where news is late a prefix is computed twice.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvpool.block import BlockKey
from kvpool.policy.admission.single import Flight
from kvpool.request.load import MAX_FLIGHTS, MAX_TAGS, TAG_BYTES, FlightTold
from kvpool.units import SECOND

MAX_AGE_NS = SECOND


class Elsewhere(NamedTuple):
    """A flight of the router called `router`."""

    router: str
    flight: FlightTold


class _Said(NamedTuple):
    at_ns: int
    flights: Mapping[int, FlightTold]
    by_tag: Mapping[bytes, FlightTold]


class Abroad:
    """What the other routers compute. Routers are known by names that all use alike."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}
        self._dropped: set[tuple[str, int]] = set()

    def heard(self, router: str, flights: Sequence[FlightTold], now_ns: int) -> None:
        """`router` has these flights, and no others."""
        by_tag: dict[bytes, FlightTold] = {}
        for flight in flights:
            if not flight.over:
                for tag in flight.tags:
                    by_tag.setdefault(tag, flight)
        self._said[router] = _Said(now_ns, {flight.number: flight for flight in flights}, by_tag)
        if self._dropped:
            self._dropped -= {each for each in self._dropped if each[0] == router and each[1] not in self._said[router].flights}

    def lost(self, router: str) -> None:
        """`router` can't be heard any more."""
        self._said.pop(router, None)
        self._dropped = {each for each in self._dropped if each[0] != router}

    def anybody(self, now_ns: int) -> bool:
        """Whether there are other routers, as far as is known now."""
        return any(now_ns - said.at_ns <= MAX_AGE_NS for said in self._said.values())

    def find(self, keys: Sequence[BlockKey], held: int, *, priority: int, now_ns: int) -> tuple[Elsewhere, int] | None:
        """The flight to follow for a chain `keys` of which `held` leading blocks are there, and how many blocks it will bring; or None.

        One that hasn't begun is followed only by those who are no more urgent.
        """
        if held >= len(keys):
            return None
        for router, said in sorted(self._said.items()):
            flight = said.by_tag.get(tag_of(keys[held])) if now_ns - said.at_ns <= MAX_AGE_NS else None
            if flight is None or (priority < flight.priority and not flight.begun) or (router, flight.number) in self._dropped:
                continue
            end = held + 1
            while end < len(keys) and said.by_tag.get(tag_of(keys[end])) is flight:
                end += 1
            return Elsewhere(router, flight), end - held
        return None

    def now(self, one: Elsewhere, now_ns: int) -> FlightTold | None:
        """What is told of `one` now; None when its router is lost, silent, or tells of it no more."""
        said = self._said.get(one.router)
        return said.flights.get(one.flight.number) if said is not None and now_ns - said.at_ns <= MAX_AGE_NS else None

    def drop(self, one: Elsewhere) -> None:
        """It takes too long: nobody here follows it any more."""
        if one.router in self._said:
            self._dropped.add((one.router, one.flight.number))


def goes_before(one: Elsewhere, me: str) -> bool:
    """Whether a flight of mine, of which no worker knows yet, is to give way to `one` over the same blocks."""
    return one.flight.begun or one.router < me


def told(number: int, flight: Flight, *, over: bool = False) -> FlightTold:
    """`flight`, as the other routers are told of it."""
    tags = tuple(tag_of(key) for key in flight.keys)
    return FlightTold(number, flight.priority, flight.first, tags, flight.begun, over, flight.held)


def within_limits(flights: Sequence[FlightTold]) -> tuple[FlightTold, ...]:
    """The last ones of `flights` that fit into one report."""
    chosen: list[FlightTold] = []
    tags = 0
    for flight in reversed(flights):
        tags += len(flight.tags)
        if len(chosen) == MAX_FLIGHTS or tags > MAX_TAGS:
            break
        chosen.append(flight)
    return tuple(chosen)


def tag_of(key: BlockKey) -> bytes:
    """What stands for `key` in a report."""
    return bytes(key[:TAG_BYTES])
