"""Who computes a prefix, and who waits for it."""

from kvpool.block import BlockKey
from kvpool.policy.admission.single import Flights


def chain(*names: str) -> list[BlockKey]:
    """Keys by name."""
    return [BlockKey(name.encode().ljust(32)) for name in names]


def test_who_wants_the_same_follows() -> None:
    """What two have in common is a leading part; the rest is the follower's own."""
    flights = Flights()
    flight = flights.lead("first", chain("a", "b", "c"), 0)
    assert flights.find(chain("a", "b", "x"), 0, priority=0) == (flight, 2)
    assert flights.find(chain("x", "b"), 0, priority=0) is None


def test_what_is_held_already_is_not_waited_for() -> None:
    """Only missing blocks count."""
    flights = Flights()
    flight = flights.lead("first", chain("a", "b", "c"), 1)
    assert flights.find(chain("a", "b", "c"), 1, priority=0) == (flight, 2)
    assert flights.find(chain("a", "b", "c"), 3, priority=0) is None


def test_over_flight_is_followed_by_nobody() -> None:
    """And whoever asks first then leads."""
    flights = Flights()
    flight = flights.lead("first", chain("a", "b"), 0)
    flights.end(flight, 1)
    flights.end(flight, 1)
    assert (flight.held, len(flights)) == (1, 0)
    assert flights.find(chain("a", "b"), 0, priority=0) is None
    second = flights.lead("second", chain("a", "b"), 0)
    assert flights.find(chain("a"), 0, priority=0) == (second, 1)


def test_later_leader_of_a_longer_chain_takes_only_its_own_part() -> None:
    """Its end must not end the other's flight."""
    flights = Flights()
    first = flights.lead("first", chain("a", "b"), 0)
    second = flights.lead("second", chain("a", "b", "c"), 0)
    flights.end(second, 3)
    assert flights.find(chain("a", "b"), 0, priority=0) == (first, 2)


def test_urgent_request_does_not_wait_for_a_less_urgent_leader_in_line() -> None:
    """It would stand in line at the leader's priority; once a worker is at it, waiting is the fastest way."""
    flights = Flights()
    flight = flights.lead("slow", chain("a"), 0, priority=5)
    assert flights.find(chain("a"), 0, priority=0) is None
    assert flights.find(chain("a"), 0, priority=5) == (flight, 1)
    flight.begun = True
    assert flights.find(chain("a"), 0, priority=0) == (flight, 1)


def test_table_is_bounded() -> None:
    """A leader beyond the bound leads nobody, and its end takes nothing away."""
    flights = Flights(max_keys=3)
    first = flights.lead("first", chain("a", "b", "c"), 0)
    second = flights.lead("second", chain("x"), 0)
    assert flights.find(chain("x"), 0, priority=0) is None
    flights.end(second, 1)
    assert flights.find(chain("a"), 0, priority=0) == (first, 1)
