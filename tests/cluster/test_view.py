"""The rule that turns readings into a view, alone: time is an argument here."""

from kvpool.cluster import Member
from kvpool.cluster.view import View
from kvpool.units import MS

LEASE_MS = 1000


def _member(number: int, incarnation: int = 1) -> Member:
    return Member(role="node", id=f"{number:032x}", incarnation=incarnation, address=f"10.0.0.{number}:7000")


def _observe(view: View, *members: Member, birth: str | None = "b1", at_ms: int) -> bool:
    return view.observe([(member, LEASE_MS) for member in members], birth=birth, now_ns=at_ms * MS)


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
