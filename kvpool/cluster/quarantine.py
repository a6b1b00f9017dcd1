"""WHO can't be reached though its heartbeats say that it lives: what members report of each other, and the vote on it.

A member whose data path is broken (a cut cable, a dead NIC, an asymmetric partition, a process that hangs but for its
heartbeat thread) keeps its lease. Those that need it notice, and say so in their own records, so a report lives no longer
than its reporter and needs no bookkeeping of its own. A member that more than half of those who may report of it do report
is in quarantine; when they stop, it isn't. Nodes and workers may report, each of any member but itself. So one broken
reporter among two or more others cuts nobody off.
"""

from collections.abc import Iterable

from kvpool.cluster.member import MAX_REPORTS, Identity, Leased
from kvpool.units import MS

REPORTING_ROLES = ("node", "prefill", "decode")
REPORT_LEASES = 2
"""A report that isn't repeated ends after so many leases of its reporter."""


class Reports:
    """Whom one member can't reach now, at most 64 others. Not thread-safe."""

    def __init__(self, lease_ms: int) -> None:
        self._ttl_ns = REPORT_LEASES * lease_ms * MS
        self._until_ns: dict[Identity, int] = {}

    def add(self, subject: Identity, now_ns: int) -> bool:
        """Report `subject` from now on for two leases; False when the list is full: who reaches nobody is itself the one cut off."""
        if subject not in self._until_ns and len(self.current(now_ns)) >= MAX_REPORTS:
            return False
        self._until_ns[subject] = now_ns + self._ttl_ns
        return True

    def remove(self, subject: Identity) -> None:
        """`subject` is well."""
        self._until_ns.pop(subject, None)

    def current(self, now_ns: int) -> frozenset[Identity]:
        """What holds now."""
        self._until_ns = {subject: until_ns for subject, until_ns in self._until_ns.items() if until_ns > now_ns}
        return frozenset(self._until_ns)


def vote(entries: Iterable[Leased]) -> frozenset[Identity]:
    """The members among `entries` that more than half of the others that may report do report."""
    entries = tuple(entries)
    against: dict[Identity, int] = {}
    reporters = {entry.member.identity for entry in entries if entry.member.role in REPORTING_ROLES}
    for entry in entries:
        if entry.member.identity in reporters:
            for subject in entry.reports - {entry.member.identity}:
                against[subject] = against.get(subject, 0) + 1
    here = {entry.member.identity for entry in entries} if against else set()
    return frozenset(subject for subject, count in against.items() if subject in here and 2 * count > len(reporters - {subject}))
