"""What a process believes about the cluster: the pure rule that turns readings of a store into a view.

A reading is the set of members whose leases the store holds now. Normally the view is just that. But a store that was
unreachable, or that lost its memory (restarted empty, flushed, failed over to an empty replica), says "nobody" before the
heartbeats have had their turn; believing it would drop the whole cluster for a second. So after a gap the view is *in
doubt*: members it knew and the reading lacks stay until each has had one whole lease of its own to publish itself again.

A gap shows in two ways: the shell reports that a reading failed (`lost`), or the store's birth token, a random value that
the first heartbeat after an emptying writes, differs from the one before. In doubt, an id that appears with a lower
incarnation than the one known is an old process that got in first, and the known one stays.
"""

from collections.abc import Iterable

from kvpool.cluster.member import Member
from kvpool.units import MS

Leased = tuple[Member, int]
"""A member and how long its lease lasts, in milliseconds."""


class View:
    """The members last known. Not thread-safe; `Board` shares it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Leased] = {}
        self._birth: str | None = None
        self._lost = False
        self._doubt_since_ns: int | None = None
        self._members: tuple[Member, ...] = ()

    @property
    def members(self) -> tuple[Member, ...]:
        """Ordered by role and id."""
        return self._members

    def lost(self) -> None:
        """A reading failed: keep everything, and doubt the next reading that succeeds."""
        self._lost = True

    def observe(self, reading: Iterable[Leased], *, birth: str | None, now_ns: int) -> bool:
        """Take in one complete reading of the store; True when the members changed."""
        if self._known and (self._lost or birth != self._birth):
            self._doubt_since_ns = now_ns
        self._lost, self._birth = False, birth
        found: dict[tuple[str, str], Leased] = {}
        for member, lease_ms in reading:
            key = member.role, member.id
            if key not in found or found[key][0].incarnation < member.incarnation:
                found[key] = member, lease_ms
        for key, (member, lease_ms) in self._known.items():
            in_doubt = self._doubt_since_ns is not None and now_ns - self._doubt_since_ns < lease_ms * MS
            if in_doubt and (key not in found or found[key][0].incarnation < member.incarnation):
                found[key] = member, lease_ms
        self._known = found
        members = tuple(found[key][0] for key in sorted(found))
        changed = members != self._members
        self._members = members
        return changed
