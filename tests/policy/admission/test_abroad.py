"""Flights of other routers: found by their blocks, for as long as they are told of, and judged alike by all."""

from kvpool.block import BlockKey, chain_keys
from kvpool.policy.admission.abroad import MAX_AGE_NS, Abroad, Elsewhere, goes_before, tag_of, told, within_limits
from kvpool.policy.admission.single import Flights
from kvpool.request.load import MAX_FLIGHTS, MAX_TAGS, FlightTold

KEYS = chain_keys(bytes(32), range(40), 4)


def flight(
    keys: list[BlockKey], first: int = 0, *, number: int = 1, priority: int = 0, begun: bool = False, over: bool = False
) -> FlightTold:
    """Over the blocks of `keys` from `first` on."""
    return FlightTold(number, priority, first, tuple(tag_of(key) for key in keys[first:]), begun, over, len(keys) if over else 0)


def test_flight_is_found_by_the_first_missing_block_and_as_far_as_it_goes() -> None:
    """What is there is nobody's flight; behind the common part another prompt goes its own way."""
    abroad = Abroad()
    abroad.heard("b", [flight(KEYS[:6], 2)], 0)
    other = [*KEYS[:4], *chain_keys(bytes(32), range(100, 124), 4)]
    assert abroad.find(KEYS, 0, priority=0, now_ns=0) is None
    found = abroad.find(KEYS, 2, priority=0, now_ns=0)
    assert found is not None
    assert (found[0].router, found[0].flight.number, found[1]) == ("b", 1, 4)
    assert (found := abroad.find(other, 2, priority=0, now_ns=0)) is not None
    assert found[1] == 2
    assert abroad.find(KEYS[:2], 2, priority=0, now_ns=0) is None


def test_flights_end_with_their_router_its_silence_or_their_own_end() -> None:
    """Nobody waits for who can't be heard; what a flight brought is told for a while."""
    abroad = Abroad()
    abroad.heard("b", [flight(KEYS)], 0)
    found = abroad.find(KEYS, 0, priority=0, now_ns=MAX_AGE_NS)
    assert found is not None
    assert abroad.find(KEYS, 0, priority=0, now_ns=MAX_AGE_NS + 1) is None
    assert abroad.now(found[0], MAX_AGE_NS + 1) is None
    assert not abroad.anybody(MAX_AGE_NS + 1)
    abroad.heard("b", [flight(KEYS, over=True)], 5)
    assert abroad.find(KEYS, 0, priority=0, now_ns=5) is None
    assert (end := abroad.now(found[0], 5)) is not None
    assert (end.over, end.held) == (True, 10)
    abroad.heard("b", [flight(KEYS)], 6)
    abroad.lost("b")
    assert abroad.find(KEYS, 0, priority=0, now_ns=6) is None


def test_urgent_request_does_not_follow_who_still_stands_in_line() -> None:
    """As at home."""
    abroad = Abroad()
    abroad.heard("b", [flight(KEYS, priority=1)], 0)
    assert abroad.find(KEYS, 0, priority=0, now_ns=0) is None
    assert abroad.find(KEYS, 0, priority=1, now_ns=0) is not None
    abroad.heard("b", [flight(KEYS, priority=1, begun=True)], 0)
    assert abroad.find(KEYS, 0, priority=0, now_ns=0) is not None


def test_flight_that_was_dropped_is_not_followed_again_until_it_is_another() -> None:
    """One that takes too long takes too long for all here; the list of those doesn't grow."""
    abroad = Abroad()
    abroad.heard("b", [flight(KEYS)], 0)
    found = abroad.find(KEYS, 0, priority=0, now_ns=0)
    assert found is not None
    abroad.drop(found[0])
    abroad.heard("b", [flight(KEYS)], 1)
    assert abroad.find(KEYS, 0, priority=0, now_ns=1) is None
    abroad.heard("b", [flight(KEYS, number=2)], 2)
    assert abroad.find(KEYS, 0, priority=0, now_ns=2) is not None
    assert not abroad._dropped


def test_of_two_that_began_together_one_goes_on() -> None:
    """Both judge alike; who is at it already isn't stopped."""
    a, b = Elsewhere("a", flight(KEYS)), Elsewhere("b", flight(KEYS))
    assert (goes_before(a, "b"), goes_before(b, "a")) == (True, False)
    assert goes_before(Elsewhere("b", flight(KEYS, begun=True)), "a")


def test_report_holds_the_newest_flights_that_fit() -> None:
    """A report is bounded; of what isn't told each router makes its own."""
    led = Flights().lead("r", KEYS, 3)
    one = told(7, led)
    assert (one.number, one.first, one.tags, one.over) == (7, 3, tuple(tag_of(key) for key in KEYS[3:]), False)
    many = [one._replace(number=number) for number in range(MAX_FLIGHTS + 5)]
    assert [each.number for each in within_limits(many)] == list(range(MAX_FLIGHTS + 4, 4, -1))
    large = [FlightTold(number, 0, 0, one.tags * (MAX_TAGS // 14)) for number in range(4)]
    assert [each.number for each in within_limits(large)] == [3, 2]
