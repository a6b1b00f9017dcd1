"""The contract of an `Announcer`, as tests: subclass `AnnouncerKit` and say how to `make` one and how its readers see it."""

from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

import pytest

from kvpool.block import BlockKey
from kvpool.pool import Announcer, Location, Reserve
from kvpool.pool.resident import Resident


class Desk(NamedTuple):
    """An announcer, and a reader of it: where it finds a key (offset, length, unverified), and a hold on what it finds there.

    `hold` gives what ends the hold, None where there is nothing to hold.
    """

    announcer: Announcer
    find: Callable[[BlockKey], tuple[int, int, bool] | None]
    hold: Callable[[BlockKey], Callable[[], None] | None]


def key(number: int) -> BlockKey:
    """The key of a block."""
    return BlockKey(sha256(b"%d" % number).digest())


def block(number: int, offset: int = 0, length: int = 100, *, unverified: bool = False) -> Resident:
    """A block as the pool has it."""
    resident = Resident(Reserve(key(number), None, 0, length), Location(offset, length), -(-length // 64) * 64, 1)
    resident.unverified = unverified
    return resident


class AnnouncerKit:
    """What every board promises the pool."""

    @pytest.fixture
    def desk(self) -> Desk:
        """A fresh one without blocks; to be overridden."""
        raise pytest.UsageError("a subclass of AnnouncerKit has to override `desk`")

    def held(self, desk: Desk, number: int) -> Callable[[], None]:
        """Hold a block that is there."""
        release = desk.hold(key(number))
        assert release is not None
        return release

    def test_published_block_is_found_until_it_is_withdrawn(self, desk: Desk) -> None:
        """Where it lies, how long it is, and whether somebody should check it."""
        assert desk.find(key(1)) is None
        desk.announcer.publish([block(1, 640, 100)])
        desk.announcer.publish([block(2, 1280, 64, unverified=True)])
        assert desk.find(key(1)) == (640, 100, False)
        assert desk.find(key(2)) == (1280, 64, True)
        assert not desk.announcer.withdraw([key(1)])
        assert desk.find(key(1)) is None
        assert desk.hold(key(1)) is None
        assert desk.find(key(2)) == (1280, 64, True)

    def test_block_that_was_checked_is_verified_where_it_is(self, desk: Desk) -> None:
        """And who holds it goes on doing so; of what has no record nothing is said."""
        desk.announcer.publish([block(1, 640, 100, unverified=True)])
        release = self.held(desk, 1)
        desk.announcer.verified(key(1))
        desk.announcer.verified(key(2))
        assert desk.find(key(1)) == (640, 100, False)
        assert desk.find(key(2)) is None
        assert desk.announcer.held(key(1))
        release()
        assert not desk.announcer.withdraw([key(1)])

    def test_key_without_a_record_is_not_held(self, desk: Desk) -> None:
        """The pool asks without knowing what had room."""
        assert not desk.announcer.withdraw([key(1)])
        assert not desk.announcer.held(key(1))

    def test_hold_is_seen_while_it_lasts(self, desk: Desk) -> None:
        """Of its own block only."""
        desk.announcer.publish([block(1)])
        desk.announcer.publish([block(2, 128)])
        release = self.held(desk, 1)
        assert (desk.announcer.held(key(1)), desk.announcer.held(key(2))) == (True, False)
        release()
        assert not desk.announcer.held(key(1))
        assert not desk.announcer.withdraw([key(1)])

    def test_withdrawal_finds_who_holds_and_goes_on_seeing_them(self, desk: Desk) -> None:
        """The bytes of a block that left wait for exactly that."""
        desk.announcer.publish([block(1)])
        first, second = self.held(desk, 1), self.held(desk, 1)
        assert desk.announcer.withdraw([key(1)])
        assert desk.find(key(1)) is None
        first()
        assert desk.announcer.held(key(1))
        second()
        assert not desk.announcer.held(key(1))

    def test_key_published_anew_is_held_while_any_of_its_records_is(self, desk: Desk) -> None:
        """A plan of moves that was dropped publishes the same bytes again: old holds are on them."""
        desk.announcer.publish([block(1)])
        old = self.held(desk, 1)
        assert desk.announcer.withdraw([key(1)])
        desk.announcer.publish([block(1)])
        assert desk.find(key(1)) == (0, 100, False)
        assert desk.announcer.held(key(1))
        assert desk.announcer.withdraw([key(1)])
        old()
        assert not desk.announcer.held(key(1))
        desk.announcer.publish([block(1, 640)])
        assert not desk.announcer.withdraw([key(1)])
