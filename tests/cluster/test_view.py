"""The rule that turns readings into a view, alone: time is an argument here."""

from dataclasses import replace

from kvpool.cluster import ClusterConfig, Member
from kvpool.cluster.member import Leased
from kvpool.cluster.view import View
from kvpool.units import MS

LEASE_MS = 1000


def _member(number: int, incarnation: int = 1) -> Member:
    return Member(role="node", id=f"{number:032x}", incarnation=incarnation, address=f"10.0.0.{number}:7000")


def _observe(view: View, *members: Member, birth: str | None = "b1", at_ms: int) -> bool:
    return view.observe([Leased(member, LEASE_MS) for member in members], birth=birth, now_ns=at_ms * MS)


def test_view_without_gap_is_the_reading() -> None:
    """The store's leases decide; a view adds no delay of its own."""
    view = View()
    assert _observe(view, _member(2), _member(1), at_ms=0)
    assert list(view.members) == [_member(1), _member(2)]
    assert not _observe(view, _member(1), _member(2), at_ms=1)
    assert _observe(view, _member(2), at_ms=2)
    assert list(view.members) == [_member(2)]


def test_view_after_a_loss_keeps_the_absent_for_exactly_one_lease() -> None:
    """A store that is back without its records gives each member one lease to publish itself, no more."""
    view = View()
    _observe(view, _member(1), _member(2), at_ms=0)
    view.lost()
    assert not _observe(view, _member(1), at_ms=60_000)
    assert not _observe(view, _member(1), at_ms=60_000 + LEASE_MS - 1)
    assert _observe(view, _member(1), at_ms=60_000 + LEASE_MS)
    assert view.members == (_member(1),)


def test_view_when_the_birth_token_changes_doubts_again() -> None:
    """Emptied is noticed without any failed reading, also when the token first vanishes and then is another."""
    view = View()
    _observe(view, _member(1), at_ms=0)
    assert not _observe(view, birth=None, at_ms=100)
    assert not _observe(view, birth="b2", at_ms=1000)
    assert not _observe(view, birth="b2", at_ms=1999)
    assert _observe(view, birth="b2", at_ms=2000)
    assert view.members == ()


def test_view_of_a_store_that_stays_empty_forgets_in_the_end() -> None:
    """No token means nobody publishes: that is one gap, not a new one at every reading."""
    view = View()
    _observe(view, _member(1), at_ms=0)
    for at_ms in range(100, 1100, 100):
        _observe(view, birth=None, at_ms=at_ms)
    assert view.members == (_member(1),)
    assert _observe(view, birth=None, at_ms=1100)


def test_view_in_doubt_refuses_an_older_incarnation() -> None:
    """A paused predecessor that reaches the emptied store first doesn't replace the one everybody knew."""
    view = View()
    _observe(view, _member(1, incarnation=5), at_ms=0)
    view.lost()
    assert not _observe(view, _member(1, incarnation=4), at_ms=10)
    assert _observe(view, _member(1, incarnation=6), at_ms=20)
    assert view.members == (_member(1, incarnation=6),)


def test_view_of_two_records_for_one_id_takes_the_newest() -> None:
    """An id stands for one process at a time."""
    view = View()
    _observe(view, _member(1, incarnation=3), _member(1, incarnation=4), _member(1, incarnation=2), at_ms=0)
    assert view.members == (_member(1, incarnation=4),)


def test_view_empty_at_a_loss_has_nothing_to_doubt() -> None:
    """Doubt protects what was known; a member that comes and goes right after the first contact isn't held back."""
    view = View()
    view.lost()
    _observe(view, _member(1), at_ms=0)
    assert _observe(view, at_ms=1)
    assert view.members == ()


def test_view_holds_the_highest_config_it_ever_saw() -> None:
    """A store that forgot the config, or is behind, doesn't take it away; one that is ahead, or level, is right."""
    view = View()
    for at_ms, (version, copies, changed, held) in enumerate(
        [
            (0, 0, False, (0, 1)),
            (2, 2, True, (2, 2)),
            (0, 0, False, (2, 2)),
            (1, 3, False, (2, 2)),
            (2, 4, True, (2, 4)),
            (3, 1, True, (3, 1)),
        ]
    ):
        config = ClusterConfig(version=version, copies=copies) if version else None
        assert view.observe((), birth="b1", now_ns=at_ms * MS, config=config) is changed
        assert (view.config.version, view.config.copies) == held


def test_view_announces_a_config_that_it_learnt_itself_once() -> None:
    """A process sees its own change at once, and its subscribers hear of it with the next reading though that one is equal."""
    view, config = View(), ClusterConfig(version=1, copies=2)
    view.learn(config)
    assert view.config == config
    assert view.observe((), birth="b1", now_ns=0, config=config)
    assert not view.observe((), birth="b1", now_ns=1, config=config)


def test_view_change_of_info_or_of_reports_is_a_change() -> None:
    """A member that says something else, and a vote that turns, are both news."""
    view = View()
    _observe(view, _member(1), _member(2), at_ms=0)
    reading = [Leased(_member(1), LEASE_MS), Leased(_member(2), LEASE_MS, frozenset({_member(1).identity}))]
    assert view.observe(reading, birth="b1", now_ns=1 * MS)
    assert view.quarantined == {_member(1).identity}
    assert not view.observe(reading, birth="b1", now_ns=2 * MS)
    assert view.observe([Leased(replace(_member(1), info={"state": "draining"}), LEASE_MS), reading[1]], birth="b1", now_ns=3 * MS)
    assert view.members[0].info == {"state": "draining"}


def test_view_in_doubt_keeps_reports_with_their_reporter() -> None:
    """A store that forgot doesn't admit a member that nobody can reach."""
    view = View()
    reading = [Leased(_member(1), LEASE_MS), Leased(_member(2), LEASE_MS, frozenset({_member(1).identity}))]
    view.observe(reading, birth="b1", now_ns=0)
    assert not view.observe(reading[:1], birth="b2", now_ns=1 * MS)
    assert view.quarantined == {_member(1).identity}
