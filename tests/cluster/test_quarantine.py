"""The vote on who can't be reached, and the list each member keeps, alone: time is an argument here."""

from kvpool.cluster import Member
from kvpool.cluster.member import MAX_RECORD_BYTES, MAX_REPORTS, Identity, Leased, decode_record, encode_record
from kvpool.cluster.quarantine import Reports, vote
from kvpool.units import MS

LEASE_MS = 1000


def _member(number: int, role: str = "node") -> Member:
    return Member(role=role, id=f"{number:032x}", incarnation=1, address=f"10.0.0.{number}:7000")


def _says(number: int, *subjects: int, role: str = "node") -> Leased:
    return Leased(_member(number, role), LEASE_MS, frozenset(_member(subject).identity for subject in subjects))


def _out(*numbers: int) -> frozenset[Identity]:
    return frozenset(_member(number).identity for number in numbers)


def test_vote_needs_more_than_half_of_the_others() -> None:
    """Half isn't enough; the subject itself isn't counted on either side."""
    assert vote([_says(1), _says(2, 1), _says(3)]) == _out()
    assert vote([_says(1), _says(2, 1), _says(3, 1)]) == _out(1)
    assert vote([_says(1), _says(2, 1), _says(3, 1), _says(4), _says(5)]) == _out()
    assert vote([_says(1), _says(2, 1), _says(3, 1), _says(4, 1), _says(5)]) == _out(1)


def test_vote_of_a_broken_reporter_cuts_nobody_off_among_three() -> None:
    """Who loses its own network reports everybody, and everybody reports it: only the one is out."""
    assert vote([_says(1, 2, 3), _says(2, 1), _says(3, 1)]) == _out(1)


def test_vote_of_the_only_other_decides() -> None:
    """One node and one worker: somebody must be believed."""
    assert vote([_says(1), _says(2, 1, role="decode")]) == _out(1)


def test_vote_counts_workers_but_not_routers_nor_about_itself() -> None:
    """Routers move no blocks."""
    assert vote([_says(1, 1), _says(2, 1, role="router")]) == _out()
    assert vote([_says(1), _says(2, 1, role="prefill"), _says(3, 1, role="decode"), _says(4, role="decode")]) == _out(1)


def test_vote_about_somebody_who_is_not_here_is_dropped() -> None:
    """A quarantine is of members."""
    assert vote([_says(1, 9), _says(2, 9)]) == _out()


def test_reports_end_two_leases_after_the_last_word() -> None:
    """Repeating renews; taking back ends at once."""
    reports, subject = Reports(LEASE_MS), _member(1).identity
    assert reports.add(subject, 0)
    assert reports.add(subject, 500 * MS)
    assert reports.current(2499 * MS) == {subject}
    assert reports.current(2500 * MS) == frozenset()
    assert reports.add(subject, 3000 * MS)
    reports.remove(subject)
    reports.remove(subject)
    assert reports.current(3000 * MS) == frozenset()


def test_reports_are_bounded_and_the_longest_list_fits_a_record() -> None:
    """A process that can reach nobody says so of 64 others, renews those, and takes up more only when some have run out."""
    reports = Reports(LEASE_MS)
    identities = [("prefill", f"{number:032x}", 2**53 - 1) for number in range(MAX_REPORTS + 1)]
    assert [reports.add(each, 0) for each in identities] == [True] * MAX_REPORTS + [False]
    assert reports.add(identities[0], 0)
    leased = Leased(_member(1), LEASE_MS, reports.current(0))
    assert len(leased.reports) == MAX_REPORTS
    assert len(encode_record(leased)) < MAX_RECORD_BYTES
    assert decode_record(encode_record(leased)) == leased
    assert reports.add(identities[-1], 2000 * MS)
